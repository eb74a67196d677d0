"""The commands `flatbed word2vec` and `flatbed neighbors`."""

from __future__ import annotations

import inspect
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import torch
import typer
from rich.console import Console

from flatbed import FlatbedError
from flatbed.word2vec.corpus import Corpus, python_corpus, read_corpus
from flatbed.word2vec.output import neighbors_table, progress_bar
from flatbed.word2vec.saved_run import SavedRun, remove_checkpoint
from flatbed.word2vec.settings import Settings
from flatbed.word2vec.trainer import Trainer
from flatbed.word2vec.vectors import Vectors, plot_loss, plot_map

LIBRARY_DEFAULTS = {"window": 2, "epochs": 20, "min_count": 40}
"""For the standard library, which is small: rare names have the contexts of a single file."""
SHOWN = ["append", "open", "list", "True", "try", "ValueError", "lock", "min"]
"""Words whose neighbours are shown at the end; frequent words replace those that are not in the text."""
N_SHOWN = 8
MOST_THREADS = 2
"""Threads by default, where there are more cores: with more of them, steps see older rows."""
INTERRUPTED = 130
"""The usual exit code of programs ended by Ctrl-C."""


def _with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Replace `**options` in a command's signature by an option for each field of `Settings`.

    Options that are not given are None, so that the command can choose their defaults.
    """
    signature = inspect.signature(command, eval_str=True)
    params = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    hints = get_type_hints(Settings, include_extras=True)
    for each in fields(Settings):
        kind, help_text = hints[each.name].__origin__, hints[each.name].__metadata__[0]
        kind = {"ngrams": str, "path": Path}.get(each.name, kind)
        shown = "3-6" if each.name == "ngrams" else each.default
        names = (f"--{each.name}/--no-{each.name}",) if kind is bool else ()
        shown = "the number of cores, at most 2" if each.name == "threads" else shown
        option = typer.Option(
            None, *names, help=help_text, show_default=False if shown is None else str(shown)
        )
        param = inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=option)
        params.append(param.replace(annotation=kind | None))
    command.__signature__ = signature.replace(parameters=params)  # type: ignore[attr-defined]
    return command


@_with_settings
def word2vec(
    files: Annotated[
        list[Path] | None, typer.Argument(help="Texts, a sentence per line.", exists=True, dir_okay=False)
    ] = None,
    *,
    out: Annotated[Path, typer.Option(help="Output file, in word2vec's format.", dir_okay=False)] = Path(
        "vectors.txt"
    ),
    binary: Annotated[bool, typer.Option("--binary", help="Write word2vec's binary format.")] = False,
    encoding: Annotated[str, typer.Option(help="Encoding of the texts.")] = "utf-8",
    max_words: Annotated[int | None, typer.Option(min=1, help="Read no more words of text.")] = None,
    also: Annotated[
        Path | None,
        typer.Option(
            help="A file of further words, which get vectors, too; needs --buckets.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="Folder of checkpoints, which Ctrl-C and SIGTERM save, too; OUT.checkpoint by default.",
            file_okay=False,
        ),
    ] = None,
    checkpoint_every: Annotated[
        float, typer.Option(min=0, help="Minutes between checkpoints while training; 0 for none.")
    ] = 10.0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the checkpoint.")] = False,
    pictures: Annotated[bool, typer.Option(help="Plot the loss and a map of words next to OUT.")] = True,
    **options: Any,
) -> None:
    """Train word vectors: skip-gram or CBOW with negative sampling, over tables in host memory.

    Without FILES, the text is the source of Python's standard library, with the defaults --window 2,
    --epochs 20 and --min-count 40.
    """
    files = files or []
    run = RunFiles(files, out, checkpoint or Path(f"{out}.checkpoint"), pictures)
    with _errors():
        defaults = {"threads": min(torch.get_num_threads(), MOST_THREADS)}
        settings = _settings(options, defaults if files else defaults | LIBRARY_DEFAULTS)
        further = _further_words(also, encoding, settings)
        run.check()
        saved = _check_checkpoint(run, settings, resume=resume)
        # Threads of torch's operations wait for each other many times in a step.
        torch.set_num_threads(1 if settings.n_parallel_steps > 1 else max(settings.threads // 2, 1))
        corpus = _read(files, encoding, max_words)
        with closing(Trainer(corpus, settings)) as trainer:
            typer.echo(
                f"{len(trainer.corpus.words):,} words occur {settings.min_count} times or more; dim "
                f"{settings.dim}, {settings.optimizer}, tables on the {settings.storage}, computed on "
                f"{settings.torch_device}"
            )
            if saved is not None:
                trainer.resume(run.checkpoint)
                typer.echo(f"continuing at step {trainer.step:,} of {trainer.n_steps:,}")
            _train(trainer, run.checkpoint, 60 * checkpoint_every)
            vectors = _write(trainer, run, further, binary=binary)
        if settings.storage == "disk":
            typer.echo(f"finished; delete {settings.path} and {run.checkpoint} to start again")
        elif SavedRun.find(run.checkpoint) is not None:
            remove_checkpoint(run.checkpoint)
            typer.echo(f"removed {run.checkpoint}: the training has finished")
    if pictures:
        _plot(trainer, vectors, run)
    shown = [word for word in SHOWN if word in vectors] + [w for w in vectors.words[:200] if len(w) > 3]
    chosen = list(dict.fromkeys(shown))[:N_SHOWN]
    Console().print(neighbors_table({word: vectors.neighbors(word, 6) for word in chosen}))
    typer.echo(f"for other words: flatbed neighbors {out} WORD...")


def neighbors(
    vectors: Annotated[
        Path, typer.Argument(help="A file in word2vec's text or binary format.", exists=True, dir_okay=False)
    ],
    words: Annotated[list[str], typer.Argument(help="Words to show neighbours of.", metavar="WORD...")],
    n: Annotated[int, typer.Option("-n", min=1, help="Neighbours per word.")] = 8,
) -> None:
    """Show the words whose vectors have the most similar directions."""
    with _errors(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded = Vectors.load(vectors)
    _print_warnings(caught)
    known = {word: loaded.neighbors(word, n) for word in words if word in loaded}
    if known:
        Console().print(neighbors_table(known))
    for word in words:
        try:
            loaded[word]
        except FlatbedError as error:
            typer.echo(f"Error: {error}", err=True)
    if len(known) < len(set(words)):
        raise typer.Exit(1)


@contextmanager
def _errors() -> Iterator[None]:
    """Print expected errors in one line, without a traceback."""
    try:
        yield
    except (FlatbedError, OSError, ValueError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error


# ---- settings and files


def _settings(options: dict[str, Any], defaults: dict[str, Any]) -> Settings:
    given = {name: value for name, value in options.items() if value is not None}
    if "ngrams" in given:
        lengths = given["ngrams"].split("-")
        if len(lengths) > 2 or not all(length.isdecimal() for length in lengths):
            raise ValueError(f"--ngrams must be lengths such as 3-6; found {given['ngrams']!r}")
        given["ngrams"] = (int(lengths[0]), int(lengths[-1]))
    settings = Settings(**defaults | given)
    try:
        torch.empty(0, device=settings.torch_device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"--device: torch cannot use {settings.device!r} ({error}); `flatbed doctor` says more"
        ) from error
    return settings


def _further_words(file: Path | None, encoding: str, settings: Settings) -> list[str]:
    if file is None:
        return []
    if not settings.buckets:
        raise ValueError("--also needs n-grams: give --buckets, 1000000 for example")
    return read_corpus(file, encoding=encoding).words


@dataclass(frozen=True, slots=True)
class RunFiles:
    """The files that a run reads and writes."""

    texts: Sequence[Path]
    out: Path
    checkpoint: Path
    has_plots: bool

    @property
    def draft(self) -> Path:
        """The name of `out` until it is complete."""
        return self.out.with_name(f".{self.out.name}.new")

    @property
    def plots(self) -> tuple[Path, Path]:
        """The plots of the loss and of the map."""
        return self.out.with_suffix(".loss.png"), self.out.with_suffix(".map.png")

    def check(self) -> None:
        """Raise if a text would be overwritten, or if the vectors could not be written at the end."""
        written = [self.out, self.draft, *(self.plots if self.has_plots else ())]
        for text in self.texts:
            for path in written:
                if path.exists() and path.samefile(text):
                    raise ValueError(f"the text {text} would be overwritten by {path}: give another --out")
        if self.out.exists() and not self.out.is_file():  # renaming would replace a device or a pipe
            raise ValueError(f"--out: {self.out} is not a regular file: give another name")
        try:
            self.draft.touch()
            self.draft.unlink()
        except OSError as error:
            raise ValueError(
                f"--out: {self.draft} cannot be written ({error.strerror}): give another folder or name"
            ) from error


def _check_checkpoint(run: RunFiles, settings: Settings, *, resume: bool) -> SavedRun | None:
    """Return the run to resume. Raise if there is none, or if a new run would overwrite one."""
    saved = SavedRun.find(run.checkpoint)
    if resume and saved is None:
        raise FlatbedError(f"{run.checkpoint} holds no checkpoint: run without --resume, or check the path")
    if saved is not None and not resume:
        folders = f"{run.checkpoint} and {settings.path}" if settings.path else run.checkpoint
        raise FlatbedError(
            f"{run.checkpoint} holds {saved}: continue it with --resume, delete {folders} to start again, or "
            "give another --checkpoint"
        )
    return saved


def _read(files: Sequence[Path], encoding: str, max_words: int | None) -> Corpus:
    with progress_bar("reading") as update, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if files:
            corpus = read_corpus(files, encoding=encoding, max_words=max_words, progress=update)
        else:
            corpus = python_corpus(max_words=max_words, progress=update)
    name = f"{len(files)} files" if len(files) > 1 else files[0] if files else "Python's standard library"
    typer.echo(f"{name}: {len(corpus):,} words of text, {len(corpus.words):,} distinct")
    _print_warnings(caught)
    return corpus


def _print_warnings(caught: Sequence[warnings.WarningMessage]) -> None:
    for warning in caught:
        typer.echo(f"Warning: {warning.message}", err=True)


# ---- training


def _train(trainer: Trainer, checkpoint: Path, save_seconds: float) -> None:
    """Train to the end. A signal ends training after the current step, with a checkpoint."""
    report, last_save = None, time.monotonic()
    with _stopped_by_signals(trainer.stop), progress_bar("training") as update:
        for report in trainer:
            speed = f"{report.words_per_second:,.0f} words/s, loss {report.loss:.3f}"
            update(report.words, report.n_words, f"epoch {report.epoch}, {speed}")
            if save_seconds and not trainer.done and time.monotonic() - last_save >= save_seconds:
                trainer.save(checkpoint)
                last_save = time.monotonic()
    if report is not None:
        typer.echo(f"trained {report.words:,} words: {speed}")
    if not trainer.done or trainer.settings.storage == "disk":
        trainer.save(checkpoint)
    if not trainer.done:
        typer.echo(
            f"saved step {trainer.step:,} of {trainer.n_steps:,} to {checkpoint}: continue with --resume"
        )
        raise typer.Exit(INTERRUPTED)


@contextmanager
def _stopped_by_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` at the first SIGINT or SIGTERM; a second one has its usual effect."""
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


def _write(trainer: Trainer, run: RunFiles, further: Sequence[str], *, binary: bool) -> Vectors:
    """Write the vectors, so that readers see the old file or the new one. Save a checkpoint on failure."""
    try:
        vectors = trainer.vectors(further)
        try:
            vectors.save(run.draft, binary=binary)
            run.draft.replace(run.out)
        finally:
            run.draft.unlink(missing_ok=True)
    except (Exception, KeyboardInterrupt) as error:
        typer.echo(f"the vectors were not written to {run.out}: {error or type(error).__name__}", err=True)
        if trainer.settings.storage != "disk":  # tables on disk already have a checkpoint
            trainer.save(run.checkpoint)
        typer.echo(f"the training is saved to {run.checkpoint}: write the vectors with --resume", err=True)
        raise
    typer.echo(f"wrote {run.out}")
    return vectors


def _plot(trainer: Trainer, vectors: Vectors, run: RunFiles) -> None:
    loss_plot, map_plot = run.plots
    try:
        plot_loss(trainer.losses, loss_plot)
        plot_map(vectors, map_plot)
    except ImportError:
        typer.echo("no pictures: matplotlib is not installed; install it with: pip install matplotlib")
    except OSError as error:
        typer.echo(f"no pictures: {error}", err=True)
    else:
        typer.echo(f"wrote {loss_plot} and {map_plot}")
