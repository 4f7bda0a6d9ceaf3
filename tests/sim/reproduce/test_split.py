"""The split was committed before the first scored run. What fitted something and what is held out does not change after
that; a cell that moved would have to be explained here."""

import hashlib

import pytest

from tripool.core.errors import ConfigError
from tripool.sim.reproduce import tables
from tripool.sim.reproduce.tables import all_cells, read_paper_tables

CALIBRATION = {
    "fig22_mtp/0/value": 874,                            # layer overhead
    "xdeepserve_decode/0/gap_ms": 2,                     # step overhead: the 2 of "93 + 2 ms"
    "table2_prefill/1/tokens_per_s": 6288,               # expert skew, over the 7,417 of perfect EPLB
    "fig23_context_cache/3/value": 861,                  # pool software rate
}
HELD_OUT = "0ff06cfdc01d6282d05f1da832c9c307d2f073f4394b2825b642fecd2e78bf20"


def cells_of(role: str) -> list:
    return [cell for cell in all_cells(read_paper_tables()) if cell.role == role]


def test_four_cells_fit_something_and_no_others():
    assert {cell.id: cell.value for cell in cells_of("calibration")} == CALIBRATION


def test_the_held_out_cells_are_those_of_the_first_run():
    lines = sorted(f"{cell.id} {cell.value} {cell.is_gain} {cell.gpu}" for cell in cells_of("held out"))
    assert len(lines) == 31
    assert hashlib.sha256("\n".join(lines).encode()).hexdigest() == HELD_OUT


def test_every_number_of_every_table_has_a_role():
    numbers = [cell for cell in all_cells(read_paper_tables()) if isinstance(cell.value, (int, float))]
    assert len(numbers) > 600
    assert all(cell.role for cell in numbers)


def test_what_is_not_covered_has_a_reason():
    for table in read_paper_tables():
        if any(cell.role == "not covered" for cell in table.cells):
            assert table.because, table.id


@pytest.mark.parametrize(("old", "new", "complaint"), [
    ('id = "hw_chip"', 'id = "hw_ship"', "hw_chip, hw_ship"),
    ('role = "quoted"', 'role = "guessed"', "table5_accuracy has the role 'guessed'"),
    ('because = "press reports"', 'why = "press"', "huawei_press has the unknown key 'why'"),
])
def test_a_split_that_does_not_fit_the_tables_is_refused(tmp_path, monkeypatch, old, new, complaint):
    changed = tmp_path / "split.toml"
    changed.write_text(tables.SPLIT.read_text().replace(old, new))
    monkeypatch.setattr(tables, "SPLIT", changed)
    with pytest.raises(ConfigError, match=complaint):
        read_paper_tables()
