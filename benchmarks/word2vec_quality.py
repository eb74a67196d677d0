"""Are flatbed's word vectors as good as gensim's? Same text, same settings, several seeds, one judge.

Run: python benchmarks/word2vec_quality.py [--seeds 10] [--json FILE] [--png FILE] [--quick]

Every trainer is compared with gensim in five measures (see `quality/judge.py`). In each, the interval of the
difference of means has to stay above −margin, and the margins were fixed before anything was compared. Two
broken trainers run along: the comparison has to find them worse. It ends with 1 where any of this fails.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from quality.judge import Judge
from quality.picture import draw
from quality.rows import BENCHMARK, RunRow, compare, failures, sheets
from quality.text import Text, read_text
from quality.trainers import BROKEN, COMPARED, REFERENCE, Contender, Task

from flatbed.bench.rows import this_machine, write_rows
from flatbed.bench.terminal import console, progress_bar, say

RESULTS = Path(__file__).resolve().parent / "results" / "cpu-word2vec-quality.json"
PICTURE = Path(__file__).resolve().parents[1] / "docs" / "img" / "cpu-word2vec-quality.png"
FIRST_SEED = 100  # nothing was tuned with these
FIRST_REFERENCE = 1000


def schedule(seeds: int, broken_seeds: int, references: int) -> Iterator[tuple[Contender, int]]:
    """The runs in order: references, then all trainers in turns, so that a busy machine slows all alike."""
    for number in range(references):
        yield REFERENCE, FIRST_REFERENCE + number
    for number in range(seeds):
        for contender in (*COMPARED, *(BROKEN if number < broken_seeds else ())):
            yield contender, FIRST_SEED + number


def run_one(contender: Contender, seed: int, *, text: Text, task: Task, judge: Judge) -> RunRow:
    """Train and measure."""
    from gensim import __version__

    trained = contender.train(text, task, seed)
    if contender is REFERENCE:
        judge.add_reference(trained)
    n_words = text.n_words
    return RunRow(
        benchmark=BENCHMARK,
        machine=this_machine("cpu"),
        trainer=contender.name,
        role=contender.role,
        seed=seed,
        dim=task.dim,
        window=task.window,
        negatives=task.negatives,
        epochs=task.epochs,
        subsample=task.subsample,
        min_count=task.min_count,
        lr=task.lr,
        n_words=n_words,
        vocabulary=len(text.words),
        gensim=__version__,
        seconds=trained.seconds,
        cpu_seconds=trained.cpu_seconds,
        words_per_second=n_words * task.epochs / trained.seconds,
        measures={} if contender is REFERENCE else judge.judge(trained),
    )


def describe(text: Text, judge: Judge) -> str:
    """One line for people: the text, and what of the judged pairs it covers."""
    covered = ", ".join(f"{len(pairs)} pairs of {name}" for name, pairs in judge.judged.items())
    return (
        f"{text.n_words:,} words to train on, {sum(map(len, text.held_out)):,} held out, {len(text.words):,} "
        f"distinct; {covered}; loss of zeros {judge.untrained_loss():.4f}"
    )


def parse() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10, help="runs of each trainer")
    parser.add_argument("--broken-seeds", type=int, default=5, help="runs of each broken trainer")
    parser.add_argument("--references", type=int, default=5, help="gensim runs that tell the neighbours")
    parser.add_argument("--epochs", type=int, default=Task().epochs)
    parser.add_argument("--threads", type=int, default=1, help="of every trainer")
    parser.add_argument(
        "--quick", action="store_true", help="three seeds, a fifth of the text: to see it run"
    )
    parser.add_argument(
        "--json", type=Path, help=f"where to store the rows; {RESULTS.name} is the stored one"
    )
    parser.add_argument("--png", type=Path, help=f"where to draw the picture; docs show {PICTURE.name}")
    options = parser.parse_args()
    if options.seeds < 2 or options.broken_seeds < 2 or options.references < 1:
        parser.error(
            "an interval needs --seeds and --broken-seeds of at least 2, and --references of at least 1"
        )
    if options.quick:
        options.seeds, options.broken_seeds, options.references = 3, 2, 2
    return options


def main() -> int:
    """Run, show and store; 1 where a trainer is not as it should be."""
    options = parse()
    torch.set_num_threads(options.threads)
    task = Task(epochs=options.epochs, threads=options.threads)
    text = read_text(min_count=task.min_count, max_sentences=2000 if options.quick else None)
    judge = Judge(text, window=task.window, subsample=task.subsample, negatives=task.negatives)
    say(describe(text, judge))
    plan = list(schedule(options.seeds, options.broken_seeds, options.references))
    runs = []
    with progress_bar("word2vec quality", len(plan)) as begin:
        for contender, seed in plan:
            begin(f"{contender.name}, seed {seed}")
            runs.append(run_one(contender, seed, text=text, task=task, judge=judge))
    comparisons = compare(runs)
    for sheet in sheets(runs, comparisons):
        console().print(sheet.drawn())
    if options.json:
        write_rows([*runs, *comparisons], options.json)
        say(f"wrote {options.json}")
    if options.png:
        draw(runs, comparisons, options.png)
        say(f"wrote {options.png}")
    wrong = failures(comparisons)
    for line in wrong:
        say(f"FAILED: {line}")
    if options.quick:
        say("a quick look decides nothing: leave --quick out for that")
    return int(bool(wrong) and not options.quick)


if __name__ == "__main__":
    sys.exit(main())
