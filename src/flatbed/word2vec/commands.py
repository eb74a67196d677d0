"""`flatbed word2vec` and `flatbed neighbors`. What needs torch is imported when they run."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from flatbed.word2vec.paths import Paths

if TYPE_CHECKING:
    from flatbed.word2vec.corpus import Corpus
    from flatbed.word2vec.settings import Settings
    from flatbed.word2vec.trainer import Trainer
    from flatbed.word2vec.vectors import Vectors

WINDOW, LIBRARY_WINDOW = 5, 2
EPOCHS, LIBRARY_EPOCHS = 5, 20
MIN_COUNT, LIBRARY_MIN_COUNT = 5, 40
"""Of texts, and of the standard library, which is small: rare names have the contexts of a single file."""
SHOWN = ["append", "open", "list", "True", "try", "ValueError", "lock", "min"]
"""Words whose neighbours are shown at the end, as far as they are in the text; then frequent ones."""
N_SHOWN = 8
LINE_SECONDS = 10.0
"""Where there is no terminal for a bar, a line in so many."""
INTERRUPTED = 130
"""The exit code of programs that Ctrl-C has ended."""


def word2vec(
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="Texts, a sentence per line. Without: the source of Python's standard library."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Where the vectors go, in word2vec's format.")] = Path(
        "vectors.txt"
    ),
    binary: Annotated[bool, typer.Option("--binary", help="In word2vec's binary format.")] = False,
    dim: Annotated[int, typer.Option(help="Numbers in a vector.")] = 128,
    window: Annotated[
        int | None,
        typer.Option(
            help=f"Contexts reach so many words to each side; {WINDOW}, or {LIBRARY_WINDOW} without files.",
            show_default=False,
        ),
    ] = None,
    negatives: Annotated[int, typer.Option(help="Random words per pair.")] = 5,
    epochs: Annotated[
        int | None,
        typer.Option(
            help=f"Passes over the text; {EPOCHS}, or {LIBRARY_EPOCHS} without files.", show_default=False
        ),
    ] = None,
    min_count: Annotated[
        int | None,
        typer.Option(
            help=f"Rarer words are left out; {MIN_COUNT}, or {LIBRARY_MIN_COUNT} without files.",
            show_default=False,
        ),
    ] = None,
    subsample: Annotated[float, typer.Option(help="Words more frequent than this are thinned out.")] = 1e-3,
    optimizer: Annotated[str, typer.Option(help="Any of flatbed.optim or torch.optim.")] = "adamax",
    lr: Annotated[
        float | None, typer.Option(help="Learning rate at the beginning; the default suits the optimizer.")
    ] = None,
    batch_words: Annotated[
        int | None, typer.Option(help="Words of text in a step; the default suits the optimizer.")
    ] = None,
    storage: Annotated[str, typer.Option(help="Where the tables live: host, device or disk.")] = "host",
    path: Annotated[
        Path | None, typer.Option(help="The folder of the tables' files, with --storage disk.")
    ] = None,
    buckets: Annotated[
        int, typer.Option(help="Rows for hashed character n-grams, 10_000_000 say; 0 for none.")
    ] = 0,
    ngrams: Annotated[str, typer.Option(help="Their lengths.")] = "3-6",
    seed: Annotated[int, typer.Option(help="Of first weights and all sampling.")] = 0,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; cuda if there is a GPU.")] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Of torch, on a CPU; half of the cores unless given.")
    ] = None,
    cache_rows: Annotated[int | None, typer.Option(help="Of each table, on a GPU.")] = None,
    max_words: Annotated[int | None, typer.Option(min=1, help="Read no more words of text.")] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="Where Ctrl-C (or SIGTERM) saves the training; OUT.checkpoint unless given.",
            show_default=False,
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint.")] = False,
    pictures: Annotated[bool, typer.Option(help="Draw the loss and a map of words beside OUT.")] = True,
) -> None:
    """Train word vectors: skip-gram with negative sampling, over tables in host memory."""
    if window is None:
        window = WINDOW if files else LIBRARY_WINDOW
    if epochs is None:
        epochs = EPOCHS if files else LIBRARY_EPOCHS
    if min_count is None:
        min_count = MIN_COUNT if files else LIBRARY_MIN_COUNT
    asked = {name: value for name, value in locals().items() if name in OPTIONS}
    settings = _settings(**asked, ngrams=ngrams)
    checkpoint = checkpoint or Path(f"{out}.checkpoint")
    paths = Paths(files or [], out, checkpoint, tables=settings.path, pictures=pictures)
    paths.check(resume=resume)
    _set_threads(threads)
    with _errors():
        paths.check_begun(resume=resume)
        corpus = _read(files or [], max_words)
        with closing(_trainer(corpus, settings)) as trainer:
            _train(trainer, checkpoint, resume=resume)
            with _saved_if_not_written(trainer, paths):
                vectors = trainer.vectors()
                _write(vectors, paths, binary=binary)
        _leave(paths)
    if pictures:
        _draw(trainer, vectors, paths)
    shown = [word for word in SHOWN if word in vectors] + [w for w in vectors.words[:200] if len(w) > 3]
    Console().print(_neighbours_table(vectors, list(dict.fromkeys(shown))[:N_SHOWN], 6))
    typer.echo(f"those of other words: flatbed neighbors {out} WORD...")


def neighbors(
    vectors: Annotated[Path, typer.Argument(help="A file in word2vec's text or binary format.")],
    words: Annotated[list[str], typer.Argument(help="Whose neighbours are wanted.", metavar="WORD...")],
    n: Annotated[int, typer.Option("-n", min=1, help="How many of each.")] = 8,
) -> None:
    """Show the words whose vectors point in the most similar directions."""
    from flatbed import FlatbedError
    from flatbed.word2vec.vectors import Vectors

    with _errors():
        loaded = Vectors.load(vectors)
    if known := [word for word in words if word in loaded]:
        Console().print(_neighbours_table(loaded, known, n))
    for word in (word for word in words if word not in loaded):
        try:
            loaded[word]
        except FlatbedError as error:
            typer.echo(f"Error: {error}", err=True)
    if len(known) < len(words):
        raise typer.Exit(1)


# ---- what they are made of

OPTIONS = {
    *("dim", "window", "negatives", "epochs", "min_count", "subsample", "optimizer", "lr", "batch_words"),
    *("storage", "path", "buckets", "seed", "device", "cache_rows"),
}


@contextmanager
def _errors() -> Iterator[None]:
    """What is wrong with the input in one line, without a traceback."""
    from flatbed import FlatbedError

    try:
        yield
    except (FlatbedError, OSError, ValueError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error


def _settings(*, ngrams: str, **options: Any) -> Settings:
    import torch

    from flatbed.word2vec.settings import Settings

    try:
        lengths = tuple(int(part) for part in ngrams.split("-"))
        options["ngrams"] = lengths * 2 if len(lengths) == 1 else lengths
    except ValueError as error:
        raise typer.BadParameter(
            f"lengths are written as 3-6; found {ngrams!r}", param_hint="--ngrams"
        ) from error
    try:
        settings = Settings(**options)
        where = settings.where
    except (TypeError, ValueError, RuntimeError) as error:
        raise typer.BadParameter(str(error)) from error
    if where.type == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("torch sees no CUDA GPU; `flatbed doctor` says more", param_hint="--device")
    return settings


def _set_threads(threads: int | None) -> None:
    """Half of the cores by default: more gain little in small steps, and wait for each other where others
    compute, too.
    """
    import torch

    torch.set_num_threads(threads or max(torch.get_num_threads() // 2, 1))


def _leave(paths: Paths) -> None:
    """After the last step: a checkpoint is of no use any more, except to open tables on disk."""
    from flatbed.word2vec.checkpoint_dir import remove

    if paths.tables is not None:
        typer.echo(f"finished; {paths.anew}")
    elif remove(paths.checkpoint):
        typer.echo(f"removed {paths.checkpoint}: the training has finished")


def _read(files: Sequence[Path], max_words: int | None) -> Corpus:
    from flatbed.word2vec.corpus import read_corpus
    from flatbed.word2vec.stdlib_corpus import python_corpus

    with _bar("reading") as update:

        def progress(done: int, n: int) -> None:
            update(done, n, "")

        if files:
            corpus = read_corpus(files, max_words=max_words, progress=progress)
        else:
            corpus = python_corpus(max_words=max_words, progress=progress)
    what = f"{len(files)} files" if len(files) > 1 else files[0] if files else "Python's standard library"
    typer.echo(f"{what}: {len(corpus):,} words of text, {len(corpus.words):,} distinct")
    return corpus


def _trainer(corpus: Corpus, settings: Settings) -> Trainer:
    from flatbed.word2vec.trainer import Trainer

    trainer = Trainer(corpus, settings)
    typer.echo(
        f"{len(trainer.corpus.words):,} words occur {settings.min_count} times or more; {settings.dim} "
        f"numbers each, {settings.optimizer}, tables on the {settings.storage}, computed on {settings.where}"
    )
    return trainer


def _train(trainer: Trainer, checkpoint: Path, *, resume: bool) -> None:
    """To the end; or until Ctrl-C, when the step under way is finished, and a checkpoint saved."""
    if resume:
        trainer.resume(checkpoint)
        typer.echo(f"going on at step {trainer.step:,} of {trainer.n_steps:,}")
        _note_threads(trainer, checkpoint)
    report = None
    with _stopped_by_signals(trainer.stop), _bar("training") as update:
        for report in trainer:
            speed = f"{report.words_per_second:,.0f} words/s, loss {report.loss:.3f}"
            update(report.words, report.n_words, f"epoch {report.epoch}, {speed}")
    if report is not None:
        typer.echo(f"trained {report.words:,} words: {speed}")
    if trainer.done and not trainer.losses:
        typer.echo("nothing was learnt: no word had another one beside it (a line is a sentence)")
    if not trainer.done or trainer.settings.storage == "disk":
        trainer.save(checkpoint)
    if not trainer.done:
        typer.echo(f"saved step {trainer.step:,} of {trainer.n_steps:,} to {checkpoint}: go on with --resume")
        raise typer.Exit(INTERRUPTED)


def _note_threads(trainer: Trainer, checkpoint: Path) -> None:
    import torch

    from flatbed.word2vec.checkpoint_dir import find

    saved, threads = find(checkpoint), torch.get_num_threads()
    if trainer.settings.where.type == "cpu" and saved is not None and saved.threads not in (None, threads):
        typer.echo(
            f"note: {saved.threads} threads there and {threads} here: sums may differ in their last bits; "
            f"with --threads {saved.threads} they do not"
        )


@contextmanager
def _saved_if_not_written(trainer: Trainer, paths: Paths) -> Iterator[None]:
    """Hours of training are not lost to a full disk."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        typer.echo(f"the vectors were not written to {paths.out}: {error or type(error).__name__}", err=True)
        if trainer.settings.storage != "disk":  # of those, a checkpoint was saved already
            trainer.save(paths.checkpoint)
        typer.echo(f"the training is saved to {paths.checkpoint}: --resume writes them", err=True)
        raise


@contextmanager
def _stopped_by_signals(stop: Callable[[], None]) -> Iterator[None]:
    """SIGINT and SIGTERM stop gently; a second SIGINT does what it always does."""
    before: dict[int, Any] = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}

    def handle(number: int, _: Any) -> None:
        stop()
        signal.signal(number, before[number])

    for number in before:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _bar(title: str) -> Iterator[Callable[[int, int, str], None]]:
    """A bar on stderr: done, of how many, and what to say beside it; lines where that is no terminal."""
    errors = Console(stderr=True)
    if not errors.is_terminal:
        yield _lines(title)
        return
    columns = (TextColumn(title), BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TimeElapsedColumn())
    says = (TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, *says, console=errors, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, n, text: bar.update(task, completed=done, total=n, description=text)


def _lines(title: str) -> Callable[[int, int, str], None]:
    last = time.monotonic()

    def update(done: int, n: int, text: str) -> None:
        nonlocal last
        if time.monotonic() - last >= LINE_SECONDS:
            last = time.monotonic()
            typer.echo(f"{title}: {done:,} of {n:,} ({done / max(n, 1):.0%}){text and f', {text}'}", err=True)

    return update


def _write(vectors: Vectors, paths: Paths, *, binary: bool) -> None:
    """A reader sees the old file or the new one, never half of one."""
    try:
        vectors.save(paths.draft, binary=binary)
        paths.draft.replace(paths.out)
    finally:
        paths.draft.unlink(missing_ok=True)
    typer.echo(f"wrote {paths.out}")


def _draw(trainer: Trainer, vectors: Vectors, paths: Paths) -> None:
    from flatbed.word2vec.plots import MISSING, draw_loss, draw_map, have_matplotlib

    if not have_matplotlib():
        typer.echo(f"no pictures: {MISSING}")
        return
    loss, plane = paths.drawn
    try:
        draw_loss(trainer.losses, loss)
        draw_map(vectors, plane)
    except OSError as error:
        typer.echo(f"no pictures: {error}", err=True)
        return
    typer.echo(f"wrote {loss} and {plane}")


def _neighbours_table(vectors: Vectors, words: Sequence[str], n: int) -> Table:
    table = Table(title="nearest neighbours", title_style="bold", box=None, padding=(0, 2))
    table.add_column("word", style="bold")
    table.add_column("neighbours, and the cosine of the angle between")
    for word in words:
        # As Text, in which neither [these] nor :these: mean anything.
        found = [
            Text.assemble(other, (f" {cosine:.2f}", "dim")) for other, cosine in vectors.neighbors(word, n)
        ]
        table.add_row(Text(word), Text("  ").join(found))
    return table
