"""Logical experts become slots at one point, by the same rule as in `core`."""

import pytest
import torch

from tripool.core.placement import EMPTY, choose
from tripool.engine.parallel.placement import SlotTable


def test_without_copies_a_slot_is_its_expert():
    expert_TK = torch.tensor([[3, 0], [1, 2]])
    assert SlotTable.identity(4).slots(expert_TK) is expert_TK


@pytest.mark.parametrize("source_rank", [0, 1, 5])
def test_copies_take_turns_as_the_map_says(source_rank):
    expert_of_slot = [2, 0, EMPTY, 1, 2, 2, 0]
    copies = {expert: [slot for slot, held in enumerate(expert_of_slot) if held == expert] for expert in range(3)}
    expert_TK = torch.tensor([[0, 1, 2], [2, 0, 1], [0, 2, 1], [1, 0, 2], [2, 1, 0]])

    found = SlotTable(expert_of_slot, 3, source_rank=source_rank).slots(expert_TK)

    assert found.tolist() == [[choose(copies[expert], token, source_rank) for expert in row]
                              for token, row in enumerate(expert_TK.tolist())]


def test_no_tokens_have_no_slots():
    assert SlotTable([1, 0, 1], 2).slots(torch.zeros(0, 2, dtype=torch.int64)).shape == (0, 2)


def test_an_expert_without_a_slot_is_our_mistake():
    with pytest.raises(AssertionError, match="expert 1 is in no slot"):
        SlotTable([0, EMPTY], 2)
