"""Train tripool-tiny on one CPU thread.

Everything that changes during training (learning rate, row length, YaRN, the weight of the MTP loss, the step of the
routing bias) is a function of *progress*, a number from 0 to 1 in steps of 1/500. Progress is the share of a time
budget (`--minutes`) or of a token budget (`--tokens`); a run keeps the token count at which each step of progress
began, `export` writes these to `schedule.json`, and `--schedule` follows such a file, so that a run made under a time
budget can be made again.

    python -m recipes.tiny.train --minutes 90
    python -m recipes.tiny.train --tokens 4000000
    python -m recipes.tiny.train --schedule recipes/tiny/schedule.json

A run that was stopped goes on from its last checkpoint in `recipes/tiny/out`.
"""

import argparse
import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from recipes.tiny.batches import Batches, is_asked, split_novels
from recipes.tiny.model import Shape, TinyDeepseek
from recipes.tiny.optimizer import make_optimizers

# glibc would give freed pages back to the system and fault them in again, every step. Read at process start.
_ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "68719476736", "MALLOC_TOP_PAD_": "268435456",
    "OMP_NUM_THREADS": "1",
}  # fmt: skip
OUT = Path(__file__).parent / "out"
SEED = 7
NUM_STEPS_OF_PROGRESS = 500
WARMUP_STEPS = 30
EARLY = 0.15        # no saving on the optimiser and the draft before
FOCUS = 0.64        # from here on the loss is of the answers, and most rows ask for what the prompt says
LAST = 0.84         # the end is for stories and short exchanges, what the model is shown with
# The learning rate over progress; it is raised once more when the task changes, and falls like one minus a root.
RATES = (
    (0.0, 1.0), (0.5, 1.0), (FOCUS, 0.72), (0.65, 1.0), (0.76, 1.0), (0.818, 0.766), (0.82, 0.507), (0.84, 0.42),
    (0.9, 0.24), (0.95, 0.11), (1.0, 0.02),
)  # fmt: skip
YARN_START = 0.7
BIAS_STEP, BIAS_FREEZE = 0.002, 0.9
CHECKPOINT_EVERY_S = 240


def learning_rate(progress: float, step: int) -> float:
    """Warm up, then follow `RATES`."""
    warm = min(1.0, (step + 1) / WARMUP_STEPS)
    for (start, before), (end, after) in itertools.pairwise(RATES):
        if progress <= end:
            return warm * (before + (after - before) * (progress - start) / (end - start))
    return RATES[-1][1]


def batch_shape(progress: float, step: int) -> tuple[int, int]:
    """Rows and their length: small steps learn fastest at first, long rows teach distance."""
    if progress < 0.45:
        return 4, 256
    num = 1 if progress < FOCUS else 2
    if progress >= YARN_START and step % 25 == 24:
        return num, 2048
    return (num, 1024) if step % 10 == 3 else (2 * num, 512)


def row_shares(progress: float, length: int) -> dict[str, float]:
    """The kinds of rows; long rows are for long documents."""
    if progress >= LAST:
        return {"novels": 0.1, "talk": 0.4} if length <= 512 else {"novels": 0.2}
    if progress >= FOCUS:
        return {"novels": 0.1, "binding": 0.5} if length <= 512 else {"novels": 0.2}
    return {"novels": 0.2, "talk": 0.25 if progress >= EARLY and length <= 512 else 0.0}


def losses(model: TinyDeepseek, token_BS: Tensor, mtp_share: float, asked_weight: float) -> tuple[Tensor, Tensor]:
    """Next-token loss, and the MTP layer's loss on some of the rows, which is enough for it.

    What a user says is random on purpose; `asked_weight` is how much guessing it counts.
    """
    weight_BS = torch.where(is_asked(token_BS), asked_weight, 1.0)

    def mean(hidden_BSD: Tensor, num_rows: int, first: int) -> Tensor:
        logits, target = model.lm_head(hidden_BSD[:num_rows]), token_BS[:num_rows, first:]
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
        weight = weight_BS[:num_rows, first:].flatten()
        return (loss * weight).sum() / weight.sum()

    hidden = model.hidden(token_BS)
    num_rows = max(1, round(len(token_BS) * mtp_share))
    drafted = model.draft_hidden(hidden[:num_rows, :-1], token_BS[:num_rows, :-1])
    return mean(hidden[:, :-1], len(token_BS), 1), mean(drafted[:, 1:], num_rows, 2)


class Clock:
    """Turns time or tokens into progress, and remembers when each step of progress began."""

    def __init__(self, minutes: float | None, tokens: int | None, schedule: list[int] | None):
        self.budget_s = minutes * 60 if minutes else None
        self.budget_tokens, self.schedule = tokens, schedule
        self.began: list[int] = []      # token count at which progress i began
        self.spent_s = 0.0

    def tick(self, elapsed_s: float, num_tokens: int) -> float:
        self.spent_s += elapsed_s
        if self.schedule is not None:
            now = sum(num_tokens >= start for start in self.schedule) - 1
        elif self.budget_tokens:
            now = NUM_STEPS_OF_PROGRESS * num_tokens // self.budget_tokens
        else:
            now = int(NUM_STEPS_OF_PROGRESS * self.spent_s / self.budget_s)
        now = min(max(now, len(self.began) - 1), NUM_STEPS_OF_PROGRESS)     # a longer budget does not turn it back
        self.began += [num_tokens] * (now + 1 - len(self.began))
        return now / NUM_STEPS_OF_PROGRESS


class Run:
    """Model, optimisers, data and counts: all that a checkpoint holds."""

    def __init__(self, clock: Clock):
        self.clock = clock
        self.model = TinyDeepseek(Shape())
        self.model.initialise(SEED)
        self.optimizers = make_optimizers(self.model)
        train_novels, _ = split_novels(OUT / "novels.txt")
        self.batches = Batches(Tokenizer.from_file(str(OUT / "tokenizer.json")), train_novels, SEED)
        self.step = self.num_tokens = 0

    def save(self, path: Path) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "batches": self.batches.state(),
            "step": self.step,
            "num_tokens": self.num_tokens,
            "began": self.clock.began,
            "spent_s": self.clock.spent_s,
        }
        torch.save(state, path.with_suffix(".part"))
        os.replace(path.with_suffix(".part"), path)

    def load(self, path: Path) -> None:
        state = torch.load(path, weights_only=False)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.batches.restore(state["batches"])
        self.step, self.num_tokens = state["step"], state["num_tokens"]
        self.clock.began, self.clock.spent_s = state["began"], state["spent_s"]

    def train_step(self, progress: float) -> tuple[float, float]:
        for optimizer, base in zip(self.optimizers, (0.02, 3e-3), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = base * learning_rate(progress, self.step)
        self.model.use_yarn = progress >= YARN_START
        num_rows, length = batch_shape(progress, self.step)
        token_BS = self.batches.next(num_rows, length, row_shares(progress, length))
        for moe in self.model.moes():
            moe.load.zero_()
        is_early = progress < EARLY
        self.optimizers[0].num_steps = 5 if is_early else 4
        main, mtp = losses(
            self.model, token_BS, 0.5 if is_early else 0.25, asked_weight=1.0 if progress < FOCUS else 0.1
        )
        weight = 0.3 if progress < 0.5 else 0.1 + 0.4 * (1 - progress)
        (main + weight * mtp).backward()
        torch.nn.utils.clip_grad_norm_(self.optimizers[1].param_groups[0]["params"], 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if progress < BIAS_FREEZE:
            for moe in self.model.moes():
                moe.bias += BIAS_STEP * torch.sign(moe.load.mean() - moe.load)
        self.step += 1
        self.num_tokens += token_BS.numel()
        return main.item(), mtp.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--minutes", type=float, help="wall time, over all resumptions")
    budget.add_argument("--tokens", type=int)
    budget.add_argument("--schedule", type=Path, help="a schedule.json of an earlier run")
    arguments = parser.parse_args()
    if any(os.environ.get(key) != value for key, value in _ALLOCATOR.items()):
        os.environ.update(_ALLOCATOR)
        os.execv(sys.executable, [sys.executable, "-m", "recipes.tiny.train", *sys.argv[1:]])
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)

    schedule = json.loads(arguments.schedule.read_text())["began"] if arguments.schedule else None
    run = Run(Clock(arguments.minutes, arguments.tokens, schedule))
    checkpoint = OUT / "checkpoint.pt"
    if checkpoint.exists():
        run.load(checkpoint)
        print(f"goes on from step {run.step}, {run.num_tokens} tokens", flush=True)
    stopped = False

    def stop(*_: object) -> None:
        nonlocal stopped
        stopped = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    last = saved = printed = time.monotonic()
    cpu, seen = time.process_time(), run.num_tokens
    totals: list[tuple[float, float]] = []
    while True:
        now = time.monotonic()
        progress = run.clock.tick(now - last, run.num_tokens)
        last = now
        if progress >= 1 or stopped:
            break
        totals.append(run.train_step(progress))
        if now - printed > 20:
            main_loss, mtp_loss = (sum(column) / len(totals) for column in zip(*totals, strict=True))
            rate, cpu_rate = ((run.num_tokens - seen) / s for s in (now - printed, time.process_time() - cpu))
            print(
                f"step {run.step:5d}  {run.num_tokens / 1e6:6.3f} M tokens  progress {progress:.3f}  "
                f"main {main_loss:.3f}  mtp {mtp_loss:.3f}  {rate:5.0f} tok/s  {cpu_rate:5.0f} tok/cpu-s",
                flush=True,
            )
            totals, printed, cpu, seen = [], now, time.process_time(), run.num_tokens
        if now - saved > CHECKPOINT_EVERY_S:
            run.save(checkpoint)
            saved = now
    run.save(checkpoint)
    print(f"stopped at step {run.step}, {run.num_tokens} tokens, progress {progress:.3f}", flush=True)


if __name__ == "__main__":
    main()
