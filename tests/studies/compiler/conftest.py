from tests.quiet import compiler_as_found, h  # noqa: F401 (fixtures)
