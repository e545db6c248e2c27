"""What C++ writes to standard error is kept from the console while it is closed, and the exception is not."""

import os

import pytest

from examples.common.quiet import stderr_closed


def test_closed_and_open_again(capfd):
    @stderr_closed()
    def refused():
        os.write(2, b"module { tt.func ... }\n")
        raise RuntimeError("PassManager::run failed")

    with pytest.raises(RuntimeError, match="PassManager"):
        refused()
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "after\n"
