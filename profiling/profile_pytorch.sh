#!/usr/bin/env bash
# The chapter's name for torch_profile.sh.
exec "$(dirname "${BASH_SOURCE[0]}")/torch_profile.sh" "$@"
