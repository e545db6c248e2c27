"""studies/compiler/caching: a variable that does not do what it should fails the run."""

import pytest

from examples.common.shown import NotShown
from examples.compiler.caching_key import CACHES
from studies.compiler.caching import NOT_A_VARIABLE, OFF, conclude

HIT, MISS, SILENT = (dict.fromkeys(CACHES, answer) for answer in ("hit", "miss", "not asked"))


def test_each_variable_has_to_do_what_is_said(h, tmp_path):
    answers = {NOT_A_VARIABLE: MISS, OFF: SILENT}
    for name in ("kept", NOT_A_VARIABLE):
        (tmp_path / name).mkdir()
    with pytest.raises(NotShown, match="nothing was kept in the temporary"):
        conclude(h, tmp_path, answers)
    (tmp_path / NOT_A_VARIABLE / "entry").touch()
    conclude(h, tmp_path, answers)
    assert h.record.facts["variables"][NOT_A_VARIABLE].startswith("0 files")
    for change, complaint in (({NOT_A_VARIABLE: HIT}, "kept 0 files: .*hit"), ({OFF: HIT}, "CACHES=1: .*hit")):
        with pytest.raises(NotShown, match=complaint):
            conclude(h, tmp_path, answers | change)
    (tmp_path / "kept" / "entry").touch()
    with pytest.raises(NotShown, match="kept 1 files"):
        conclude(h, tmp_path, answers)
