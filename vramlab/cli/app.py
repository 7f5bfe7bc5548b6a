"""Every command and its options. The work is done elsewhere, imported when a command is called."""

from __future__ import annotations

import os
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from vramlab import __version__

# What there is beside the commands where the script `run` calls; it names itself in VRAMLAB_PROG, and answers tests and clean itself.
_OF_THE_SCRIPT = "{0} workflow FILE is short for {0} run workflow FILE; {0} tests and {0} clean [--all] test and tidy this checkout."
_WORDS_OF_THE_SCRIPT = ("tests", "clean") if "VRAMLAB_PROG" in os.environ else ()


class _Group(TyperGroup):
    """Words that belong together, such as `report run`. Where there is one command only, what was meant is plain."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the first word names."""
        if len(self.commands) == 1 and args and not get_close_matches(args[0], self.commands, n=1):
            ctx.fail(f"No such command {args[0]!r}. Did you mean '{ctx.command_path} {next(iter(self.commands))} {args[0]}'?")
        return super().resolve_command(ctx, args)


class _Commands(TyperGroup):
    """Knows how the script's own words are spelt, too."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the first word names. Its usage error names the nearest spelling among all words."""
        known = [*self.commands, *_WORDS_OF_THE_SCRIPT]
        close = get_close_matches(args[0], known, n=1) if args and args[0] not in self.commands else []
        if close and close[0] in _WORDS_OF_THE_SCRIPT:
            ctx.fail(f"No such command {args[0]!r}. Did you mean {close[0]!r}?")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="vramlab", cls=_Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
    help="A reproducibility benchmark harness for GPU-memory management in DNN training.",
    epilog=_OF_THE_SCRIPT.format(os.environ["VRAMLAB_PROG"]) if "VRAMLAB_PROG" in os.environ else None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def _group(name: str, text: str, below: typer.Typer = app) -> typer.Typer:
    group = typer.Typer(cls=_Group, no_args_is_help=True, rich_markup_mode=None, help=text)
    below.add_typer(group, name=name)
    return group


REPLAN_SECONDS = 60.0  # for one cell
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Collections = Annotated[list[Path] | None, typer.Option("--collection", metavar="DIR", help="A further collection; may be repeated.")]
Results = Annotated[Path, typer.Option("--output-dir", metavar="DIR", help="Where the runs are.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", show_default=False,
                                                       help="Sets a key of the workflow; `list keys` shows all.")]
ModelName = Annotated[str, typer.Option("--model", metavar="NAME", help="Of `list models`.")]
BatchSize = Annotated[int, typer.Option("--batch", metavar="N", min=1, help="Samples in a step.")]
Device = Annotated[str, typer.Option("--device", metavar="auto|cpu|cuda:0|sim:NAME", help="What the target auto stands for.")]
DataDir = Annotated[Path | None, typer.Option("--data-dir", metavar="DIR", help="Archives, keys, SQLite; else VRAMLAB_SERVER_DATA_DIR, "
                                                                              "else ./vramlab-server.")]
DatabaseUrl = Annotated[str | None, typer.Option("--database", metavar="URL", help="postgresql://user:password@host/name; else "
                                                                                  "VRAMLAB_SERVER_DATABASE_URL, else SQLite in DIR.")]
SimulatedUnlessGiven = Annotated[str | None, typer.Option(
    "--device", metavar="cpu|cuda:0|sim:NAME", help="Without it sim:v100-32gb is assumed, and said.", show_default=False)]
_RUN = "A run's folder, WORKFLOW/RUN, the start of its id, or a workflow's name."
RunName = Annotated[str, typer.Argument(metavar="RUN", help=_RUN)]

_run = _group("run", "Run a workflow.")
_validate = _group("validate", "Check a file.")
_plan = _group("plan", "Plan a step without running it.")
_report = _group("report", "Write the report of runs.")
_check = _group("check", "Check a method, a bundle or the predictions.")
_compare = _group("compare", "Hold two runs against each other.")
_train = _group("train", "Train a method that learns.")
_server = _group("server", "Look after a server of shared results, on its own machine.")
_account = _group("account", "Who may submit.", below=_server)
_token = _group("token", "What an account shows when it submits.", below=_server)


@app.callback(invoke_without_command=True)
def _top(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(f"vramlab {__version__}")
        raise typer.Exit()


@_run.command("workflow")
def run_workflow(
    file: Annotated[str, typer.Argument(metavar="FILE|NAME", help="A workflow's path or name.")],
    overrides: Overrides = None,
    device: Device = "auto",
    output_dir: Results = Path("results"),
    collection: Collections = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would run, what it takes and what cannot be tested here.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run a workflow, or resume it: cells that are done are kept. KEY=VALUE overrides any key: batch_sizes=[8,16] model.image_size=64."""
    from vramlab.cli.workflows import run

    raise typer.Exit(run(file, overrides or [], device, output_dir, collection or [], is_dry=dry_run, as_json=as_json))


if "VRAMLAB_PROG" in os.environ:  # `./run workflow`: its usage and its hints are of the form that was called
    app.command("workflow")(run_workflow)


@_validate.command("workflow")
def validate_workflow(
    file: Annotated[str, typer.Argument(metavar="FILE|NAME", help="A workflow's path or name.")],
    overrides: Overrides = None,
    collection: Collections = None,
    as_json: AsJson = False,
) -> None:
    """Check a workflow for CPU and GPU; every error names file, line and column."""
    from vramlab.cli.workflows import validate

    raise typer.Exit(validate(file, overrides or [], collection or [], as_json=as_json))


@app.command("list")
def list_(
    what: Annotated[str, typer.Argument(metavar="models|methods|workflows|keys|devices|claims|runs", show_default=False)],
    tags: Annotated[str | None, typer.Option("--tags", metavar="T[,T]", help="Only what carries all of these tags.")] = None,
    collection: Collections = None,
    output_dir: Results = Path("results"),
    shows_all: Annotated[bool, typer.Option("--all", help="Of claims every one, not only those with a verdict.")] = False,
    as_json: AsJson = False,
) -> None:
    """List models, methods, workflows, the keys of a workflow file, devices, claims or runs."""
    from vramlab.cli.shelves import list_shelf

    raise typer.Exit(list_shelf(what, tags.split(",") if tags else [], collection or [], output_dir, shows_all=shows_all, as_json=as_json))


@app.command("show")
def show(
    what: Annotated[str, typer.Argument(metavar="method|model|workflow|key|device|claim|run", show_default=False)],
    name: Annotated[str, typer.Argument(metavar="NAME", help="As the list has it.")],
    collection: Collections = None,
    output_dir: Results = Path("results"),
    as_json: AsJson = False,
) -> None:
    """Show all of one method, model, workflow, key of a workflow file, device, claim or run."""
    from vramlab.cli.shelves import show_item

    raise typer.Exit(show_item(what, name, collection or [], output_dir, as_json=as_json))


@_plan.command("step")
def plan_step(
    model: ModelName,
    batch: BatchSize,
    method: Annotated[str, typer.Option("--method", metavar="NAME", help="Of `list methods`.")],
    overrides: Overrides = None,
    budget: Annotated[str | None, typer.Option(
        "--budget", metavar="60%|6GiB|auto", help="The most that a step may hold: a share of eager's peak, a size, what is free.")] = None,
    device: SimulatedUnlessGiven = None,
    save_schedule: Annotated[Path | None, typer.Option(
        "--save-schedule", metavar="FILE", help="Keep the schedule; the method schedule-file runs it.")] = None,
    collection: Collections = None,
    as_json: AsJson = False,
) -> None:
    """Capture one training step, plan it and predict it. KEY=VALUE sets any key: model.image_size=64
    training.optimizer=adam methods.dtr.options.heuristic=eq.

    Exit code 1 when the method has no plan within the budget.
    """
    from vramlab.cli.workflows import plan_one_step

    raise typer.Exit(plan_one_step(model, batch, method, budget, device, overrides or [], collection or [],
                                   save_schedule, as_json=as_json))


@app.command("advise")
def advise(
    model: Annotated[str, typer.Option("--model", metavar="NAME|MODULE:FUNCTION", help="A model, or a function of yours that takes a batch "
                                       "size and returns model, loss_fn, example and, if you like, optimizer.")],
    batch: BatchSize,
    overrides: Overrides = None,
    device: Annotated[str | None, typer.Option(
        "--device", metavar="sim:NAME", help="Without it sim:v100-32gb is assumed, and said.", show_default=False)] = None,
    budget: Annotated[str | None, typer.Option("--budget", metavar="24GiB|60%", help="All of the device's memory without it.")] = None,
    methods: Annotated[str | None, typer.Option("--methods", metavar="M[,M]", help="Ask these alone.")] = None,
    seconds: Annotated[float, typer.Option("--seconds", min=1, help="The most that one method may take.")] = 240.0,
    collection: Collections = None,
    as_json: AsJson = False,
) -> None:
    """Say which methods fit a training step on a device, how fast they are there, up to what batch, and how to run the best. All of it is
    simulated. KEY=VALUE sets any key, as for `plan step`.

    Exit code 1 when no method fits.
    """
    from vramlab.cli.advise import print_advice

    raise typer.Exit(print_advice(model, batch, device, budget, methods, seconds, overrides or [], collection or [], as_json=as_json))


@_train.command("dqn")
def train_dqn(
    model: ModelName,
    batch: BatchSize = 32,
    budgets: Annotated[str | None, typer.Option("--budgets", metavar="80%,60%", help="Budgets to learn on, else random.")] = None,
    device: Annotated[str | None, typer.Option(
        "--device", metavar="sim:NAME", help="Whose op and copy times count; sim:v100-32gb without it.", show_default=False)] = None,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Decisions to learn from; instead of --minutes.")] = None,
    minutes: Annotated[float | None, typer.Option("--minutes", min=0.01, help="Stop after so long; 10 without either.")] = None,
    network: Annotated[str, typer.Option("--network", metavar="graph|mlp", help="Message passing over the tape, or none.")] = "graph",
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of all that is drawn.")] = 0,
    output: Annotated[Path | None, typer.Option("--output", metavar="DIR", help="Where the training's state and curve go.")] = None,
    collection: Collections = None,
) -> None:
    """Train a DQN agent for one model on the simulator. Resumes after an interruption; the weights go to the user's cache."""
    from vramlab.cli.train import train_dqn as train

    raise typer.Exit(train(model, batch, budgets, device, steps, minutes, network, seed, output, collection or []))


@_report.command("run")
def report_run(
    runs: Annotated[list[str], typer.Argument(metavar="RUN", show_default=False, help=_RUN)],
    pdf: Annotated[bool, typer.Option("--pdf", help="report.pdf too: each figure on a page of its own size, then the tables.")] = False,
    latex: Annotated[bool, typer.Option(
        "--latex", help="appendix.tex too, the artifact appendix with tables, for \\input; report.tex compiles it alone.")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="cells.csv too, a row a cell, and a file that says what each column is.")] = False,
    kinds: Annotated[list[str] | None, typer.Option(
        "--format", metavar="html|pdf|latex|csv|ro-crate", show_default=False,
        help="pdf, latex and csv as the options above; ro-crate: ro-crate-metadata.json too, the folder is then an RO-Crate 1.1. "
             "May be repeated.")] = None,
    authors: Annotated[list[str] | None, typer.Option(
        "--author", metavar="NAME", help="Of the results, in the crate; 'Name <https://orcid.org/...>' too. May be repeated.")] = None,
    licence: Annotated[str, typer.Option("--licence", metavar="SPDX-ID", help="Of the results, in the crate: CC-BY-4.0, say.")] = "",
    output_dir: Results = Path("results"),
    collection: Collections = None,
) -> None:
    """Write report.html of one run or more, from their records, and beside it what the options name.

    No browser, no LaTeX and no torch is needed: matplotlib draws the PDF. The same records give the same bytes. Of a bundle they are
    written beside it, into BUNDLE.report: a bundle holds what its manifest names and nothing else.
    """
    from vramlab.cli.reports import report

    flags = {"pdf": pdf, "latex": latex, "csv": csv}
    raise typer.Exit(report(runs, output_dir, collection or [], [*(kinds or []), *(name for name, is_set in flags.items() if is_set)],
                            authors=authors or (), licence=licence))


@app.command("view")
def view(
    run: RunName,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: a free one.")] = 0,
    output_dir: Results = Path("results"),
    collection: Collections = None,
) -> None:
    """Serve a run's report on this machine's loopback address. The page follows a run that goes on; Ctrl-C ends it.

    Pages are made on idle processor time only, so that step times that are being measured stay what they are; on a busy machine that
    takes long.

    On a machine without a screen: ssh -L PORT:127.0.0.1:PORT HOST, then open the address that is printed.
    """
    from vramlab.cli.reports import view as serve

    raise typer.Exit(serve(run, output_dir, collection or [], port))


@_compare.command("run")
def compare_run(
    first: Annotated[str, typer.Argument(metavar="A", show_default=False, help=_RUN)],
    second: Annotated[str, typer.Argument(metavar="B", show_default=False, help="Another, which is held against A.")],
    threshold: Annotated[float, typer.Option("--threshold", metavar="SHARE", min=0.0, help="How much worse is a regression.")] = 0.05,
    output_dir: Results = Path("results"),
    as_json: AsJson = False,
) -> None:
    """Compare run B with run A, cell by cell: two machines, or two versions.

    Exit code 1 when something is worse in B, by more than the threshold and beyond the noise.
    """
    from vramlab.cli.runs import compare_two

    raise typer.Exit(compare_two(first, second, threshold, output_dir, as_json=as_json))


@app.command("crowd-submit")
def crowd_submit(
    run: RunName,
    to: Annotated[str, typer.Option("--to", metavar="URL|DIR", help="A server, or a folder that collects bundles.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be sent, and check it; send and write nothing.")] = False,
    supersedes: Annotated[str | None, typer.Option(
        "--supersedes", metavar="BUNDLE", help="An earlier bundle of yours that this one takes the place of.")] = None,
    output_dir: Results = Path("results"),
) -> None:
    """Pack a run into a signed bundle, check it, and give it to a server or put it into a folder (it may be a git repository).

    Host and user names, paths and UUIDs are taken out before. The same run again sends nothing twice. Exit code 4: refused.
    """
    from vramlab.cli.crowd import submit

    raise typer.Exit(submit(run, to, output_dir, is_dry=dry_run, supersedes=supersedes))


@app.command("crowd-pull")
def crowd_pull(
    url: Annotated[str, typer.Argument(metavar="URL", help="A server.", show_default=False)],
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="Where the bundles go, as DIR/WORKFLOW/BUNDLE.")] = Path("crowd"),
    workflow: Annotated[str | None, typer.Option("--workflow", metavar="NAME", help="Bundles of this workflow only.")] = None,
    unverified: Annotated[bool, typer.Option("--unverified", help="Also what nobody has reproduced or checked.")] = False,
) -> None:
    """Bring a server's bundles down; `report run` and `compare run` read them with --output-dir DIR.

    Each is checked here before it gets its place, and the server's mark is kept beside it. What is there already is not fetched again.
    """
    from vramlab.cli.crowd import pull

    raise typer.Exit(pull(url, to, workflow, include_unverified=unverified))


@app.command("cite")
def cite(run: RunName, output_dir: Results = Path("results"), collection: Collections = None) -> None:
    """Print BibTeX of what a run used: the papers of its methods and models, its data."""
    from vramlab.cli.runs import print_citations

    raise typer.Exit(print_citations(run, output_dir, collection or []))


@_check.command("method")
def check_method(
    name: Annotated[str, typer.Argument(metavar="NAME|DIR", help="A method's name, or its folder COLLECTION/methods/NAME.")],
    collection: Collections = None,
    as_json: AsJson = False,
) -> None:
    """Check a method: its card, imports, options, the contract on toy tapes, and three steps against eager PyTorch.

    Exit code 0: all is well; 1: a check failed; 2: there is no such method, or its card is wrong.
    """
    from vramlab.cli.checks import check_one_method

    raise typer.Exit(check_one_method(name, collection or [], as_json=as_json))


@_check.command("bundle")
def check_bundle(
    bundle: Annotated[Path, typer.Argument(metavar="B", help="A bundle's folder or .tar.gz, or a folder that collects bundles.")],
    replan: Annotated[bool, typer.Option("--replan", help="Let methods plan again on the bundle's tapes, and compare.")] = False,
    replan_seconds: Annotated[float, typer.Option("--replan-seconds", min=1, help="The most for one cell.")] = REPLAN_SECONDS,
    as_json: AsJson = False,
) -> None:
    """Check a bundle as a server does: manifest, signature, schema, and every number that follows from others, derived anew.

    Exit code 0: accepted; 4: refused; 2: it is no bundle.
    """
    from vramlab.cli.crowd import check_bundles

    raise typer.Exit(check_bundles(bundle, as_json=as_json, replan_seconds=replan_seconds if replan else 0.0))


@_check.command("prediction")
def check_prediction(
    runs: Annotated[list[str] | None, typer.Argument(metavar="RUN", show_default=False, help="Runs to judge.")] = None,
    models: Annotated[str | None, typer.Option("--models", metavar="M[,M]", help="Run cells of these models instead.")] = None,
    methods: Annotated[str, typer.Option(
        "--methods", metavar="M[,M]", help="By these methods; for --models, as is all below.")] = "replay,checkpoint,delta",
    budgets: Annotated[str, typer.Option("--budgets", metavar="80%[,60%]", help="Shares of eager's peak, or sizes.")] = "80%,60%",
    batch: BatchSize = 8,
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=1, help="Timed steps a cell; 6 or more tell the drift.")] = 6,
    sets: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set any key: model.image_size=64.")] = None,
    device: Annotated[str, typer.Option("--device", metavar="auto|cpu|cuda:0", help="auto: the first GPU, else the CPU.")] = "auto",
    output_dir: Results = Path("results"),
    collection: Collections = None,
    as_json: AsJson = False,
) -> None:
    """Compare simulated with measured peaks and step times, over runs or over --models run now.

    Exit code 1 when step times are off by more than 10 % in the median without transfers, or by 15 % with.
    """
    from vramlab.cli.checks import Grid, check_prediction as check
    from vramlab.cli.words import listed

    grid = Grid(models=listed("--models", models or ""), methods=listed("--methods", methods), budgets=listed("--budgets", budgets),
                batch=batch, steps=steps, device=device, overrides=sets or [])
    raise typer.Exit(check(runs or [], output_dir, grid, collection or [], as_json=as_json))


@app.command("new")
def new(
    what: Annotated[str, typer.Argument(metavar="method|model|workflow", show_default=False)],
    name: Annotated[str, typer.Argument(metavar="NAME", show_default=False, help="Lower-case letters, digits and -.")],
) -> None:
    """Write a new method, model or workflow into the current directory's collection, complete as it stands."""
    from vramlab.cli.new import make

    raise typer.Exit(make(what, name, Path.cwd()))


@app.command("calibrate")
def calibrate(
    device: Annotated[str, typer.Option("--device", metavar="auto|cpu|cuda:0", help="auto: the first GPU, else the CPU.")] = "auto",
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure again what is known.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure this machine: arithmetic by shape, memory, link, latencies. Then the target sim:this stands for it."""
    from vramlab.cli.calibrate import calibrate as measure

    raise typer.Exit(measure(device, refresh=refresh, as_json=as_json))


@app.command("doctor")
def doctor(output_dir: Results = Path("results"), as_json: AsJson = False) -> None:
    """Say what this machine can do, and how to fix the rest."""
    from vramlab.cli.runs import examine

    raise typer.Exit(examine(output_dir, as_json=as_json))


@app.command("serve")
def serve(
    host: Annotated[str, typer.Option("--host", metavar="ADDRESS", help="0.0.0.0 for all of this machine's addresses.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: a free one.")] = 8080,
    replan: Annotated[bool, typer.Option("--replan", help="Let methods plan again, after a bundle is acknowledged; 60 s a cell.")] = False,
    data_dir: DataDir = None,
    database: DatabaseUrl = None,
) -> None:
    """Serve a shared collection of results: takes bundles in, re-derives every number, shows who reproduced what. Ctrl-C ends it.

    Every limit and tolerance can be set by a variable VRAMLAB_SERVER_...; a wrong name is told with the right ones. In front of it belongs
    a proxy that speaks HTTPS.
    """
    from vramlab.cli.server import serve as run

    raise typer.Exit(run(host, port, data_dir, database, REPLAN_SECONDS if replan else None))


@_account.command("create")
def server_account_create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Lower-case letters, digits, - and _.")],
    display_name: Annotated[str, typer.Option("--display-name", metavar="TEXT", help="Shown beside the name.")] = "",
    affiliation: Annotated[str, typer.Option("--affiliation", metavar="TEXT", help="Shown with it.")] = "",
    data_dir: DataDir = None,
    database: DatabaseUrl = None,
) -> None:
    """Make an account."""
    from vramlab.cli.server import create_account

    raise typer.Exit(create_account(name, display_name, affiliation, data_dir, database))


@_account.command("list")
def server_account_list(data_dir: DataDir = None, database: DatabaseUrl = None, as_json: AsJson = False) -> None:
    """List the accounts."""
    from vramlab.cli.server import list_accounts

    raise typer.Exit(list_accounts(data_dir, database, as_json=as_json))


@_account.command("disable")
def server_account_disable(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of an account.")],
    data_dir: DataDir = None,
    database: DatabaseUrl = None,
) -> None:
    """End all tokens of an account at once; what it has submitted stays."""
    from vramlab.cli.server import disable_account

    raise typer.Exit(disable_account(name, data_dir, database))


@_account.command("revoke-key")
def server_account_revoke_key(
    key: Annotated[str, typer.Argument(metavar="KEY", help="Its id: the 16 digits in a bundle's signature.")],
    data_dir: DataDir = None,
    database: DatabaseUrl = None,
) -> None:
    """Take no bundle that a key signs any more; those that it has signed stay."""
    from vramlab.cli.server import revoke_key

    raise typer.Exit(revoke_key(key, data_dir, database))


@_token.command("create")
def server_token_create(
    account: Annotated[str, typer.Argument(metavar="ACCOUNT", help="Whose it is.")],
    scope: Annotated[list[str] | None, typer.Option("--scope", metavar="submit|organise|admin", help="May be repeated; submit.")] = None,
    label: Annotated[str, typer.Option("--label", metavar="TEXT", help="What it is for.")] = "",
    days: Annotated[float | None, typer.Option("--days", min=0.001, help="How long it holds; for ever without.")] = None,
    data_dir: DataDir = None,
    database: DatabaseUrl = None,
) -> None:
    """Make a token and print it, this once: only a hash of it is kept."""
    from vramlab.cli.server import create_token

    raise typer.Exit(create_token(account, scope or [], label, days, data_dir, database))


@_token.command("list")
def server_token_list(data_dir: DataDir = None, database: DatabaseUrl = None, as_json: AsJson = False) -> None:
    """List the tokens by their ids."""
    from vramlab.cli.server import list_tokens

    raise typer.Exit(list_tokens(data_dir, database, as_json=as_json))


@_token.command("revoke")
def server_token_revoke(
    token: Annotated[str, typer.Argument(metavar="ID", help="As the list has it: the 16 digits after vl_.")],
    data_dir: DataDir = None,
    database: DatabaseUrl = None,
) -> None:
    """End a token at once."""
    from vramlab.cli.server import revoke_token

    raise typer.Exit(revoke_token(token, data_dir, database))


@_server.command("backup")
def server_backup(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Made anew; never overwritten.")],
    data_dir: DataDir = None,
    database: DatabaseUrl = None,
) -> None:
    """Write the whole server into one file: rows, archives, keys. The server may run meanwhile."""
    from vramlab.cli.server import back_up

    raise typer.Exit(back_up(file, data_dir, database))


@_server.command("restore")
def server_restore(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="As `server backup` wrote it.")],
    data_dir: DataDir = None,
    database: DatabaseUrl = None,
) -> None:
    """Fill an empty place from a backup, of SQLite or PostgreSQL alike."""
    from vramlab.cli.server import restore

    raise typer.Exit(restore(file, data_dir, database))
