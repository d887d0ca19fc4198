"""Features in a file: what is read back, what a kill leaves, what is not held in memory."""

import pytest
import torch

from stillhouse.metrics.bank import Bank, blocks


@pytest.fixture
def rows() -> torch.Tensor:
    return torch.randn(37, 5, generator=torch.Generator().manual_seed(0))


def test_rows_come_back_in_any_order(tmp_path, rows):
    bank = Bank(tmp_path / "bank", 5)
    for part in rows.split(8):
        bank.add(part)
    assert len(bank) == 37
    assert torch.equal(bank[:], rows)
    assert torch.equal(bank[3:9], rows[3:9])
    assert torch.equal(bank[30:99], rows[30:])
    assert torch.equal(bank[::7], rows[::7])
    picked = torch.tensor([36, 0, 5, 5, -1])
    assert torch.equal(bank[picked], rows[picked])
    assert bank[5:5].shape == (0, 5)
    assert torch.equal(torch.cat(list(blocks(bank, 10))), rows)


@pytest.mark.parametrize("torn", [0, 1, 19])
def test_a_torn_row_is_cut_off(tmp_path, rows, torn):
    path = tmp_path / "bank"
    first = Bank(path, 5)
    first.add(rows)
    first.close()
    with path.open("ab") as file:
        file.write(b"\x7f" * torn)
    again = Bank(path, 5)
    again.add(rows[:2])
    assert torch.equal(again[:], torch.cat([rows, rows[:2]]))


def test_cut_rows_are_gone(tmp_path, rows):
    bank = Bank(tmp_path / "bank", 5)
    bank.add(rows)
    bank.cut(4)
    bank.add(rows[10:12])
    assert torch.equal(bank[:], torch.cat([rows[:4], rows[10:12]]))


def test_rows_that_do_not_exist_and_rows_of_another_width_are_refused(tmp_path, rows):
    bank = Bank(tmp_path / "bank", 5)
    bank.add(rows)
    with pytest.raises(IndexError):
        bank[torch.tensor([37])]
    with pytest.raises(ValueError, match="5 numbers"):
        bank.add(torch.zeros(3, 4))
