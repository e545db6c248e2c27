"""The study of fp8_attention: quantizing the inputs is most of the error."""

from studies.fp8.fp8_attention import study


def test_study(h, monkeypatch):
    monkeypatch.setattr(h, "codegen", lambda *args, **kwargs: [])
    study(h)
    rows = h.record.facts["error over the answer; of FP8 inputs in exact arithmetic / in FP8"]
    assert set(rows) == {"normal data", "outlier channels", "heads of unequal size"}
    for errors in rows.values():
        for scales in ("a scale a head", "one scale"):
            exact, ours = errors[scales]
            assert errors["16 bits"] < ours
            assert exact <= 1.1 * ours
        assert errors["a scale a head"][1] < 0.15
    assert rows["normal data"]["a scale a head"][1] < 0.07
