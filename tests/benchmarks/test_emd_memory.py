"""The table of memory of EM distillation: what it counts has a closed form."""

from pathlib import Path

import pytest

from stillhouse.models.adapters import adapter_sizes


@pytest.mark.slow
def test_bytes_are_those_of_the_closed_form(monkeypatch):
    """P bytes of a network, A of its adapters; an average of the generator alone."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import emd

    result = emd.memory(2)
    model = emd.networks()[0].network.model
    P = 4 * sum(w.numel() for w in model.parameters())
    A = 4 * sum(adapter_sizes(model, emd.RANK).values())
    assert result["stays"] == {"full": 8 * P, "lora": 5 * P + 3 * A}
    full, lora = (result["bytes"][kind] for kind in ("full", "lora"))
    assert (full["teacher"]["parameters"], lora["teacher"]["parameters"]) == (P, P)
    assert [full[name]["gradients"] for name in ("student", "score")] == [P, P]
    assert [lora[name]["gradients"] for name in ("student", "score")] == [P, A]
    for rows in (full, lora):
        peaks = rows["iteration"]["peak"]
        assert peaks["16"] < 1.05 * peaks["1"]
        assert peaks["1"] >= max(rows[name]["peak"]["1"] for name in ("student", "score"))
        assert rows["student"]["peak"]["1"] > P  # the gradients, and activations
    shown = emd.table(result).splitlines()
    assert f"| teacher | {P / 1e6:.2f} |" in shown[2]
    assert f"{(5 * P + 3 * A) / 1e6:.2f}" in shown[-1]
