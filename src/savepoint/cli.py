"""The `savepoint` command: one verb, one Python function. Exit status 0 on success, 1 when what was checked falls short, 2 on bad usage or
input (one line that says what is wrong), 130 when a person stopped it."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import savepoint
from savepoint.errors import Interrupted, UserError


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, run one verb, and turn what went wrong into a line and an exit status."""
    arguments = build_parser().parse_args(argv)
    try:
        return int(arguments.verb(arguments) or 0)
    except UserError as error:
        print(f"savepoint: {error}", file=sys.stderr)
        return 2
    except Interrupted as stop:
        print(f"\nsavepoint: {stop}", file=sys.stderr)
        return 130
    except KeyboardInterrupt:
        print("\nsavepoint: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader has gone (`savepoint ... | head`): nothing to say to it, and Python must not try at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="savepoint", description="Train language models as agents over live databases.", formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Start with `savepoint run quickstart`, or see what works on this machine with `savepoint doctor`.",
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"savepoint {savepoint.__version__}")
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    run = _verb(verbs, "run", run_verb, "run a whole plan: every stage, evaluations between them, metrics, traces and a report")
    run.epilog = _settings_help()
    run.add_argument("recipe", nargs="?", help="a recipe file, or the name of one that comes with Savepoint (quickstart); not needed with --resume")
    _set_option(run)
    run.add_argument("--out", type=Path, metavar="DIR", help="folder of the run (default: runs/NAME of the recipe)")
    run.add_argument("--resume", action="store_true", help="go on where the run in --out was stopped")
    _common(run)

    plan = _verb(verbs, "plan", plan_verb, "print what a run would do: stages, steps, trajectories, memory, estimated time; run nothing")
    plan.epilog = _settings_help()
    plan.add_argument("recipe", help="a recipe file, or the name of one that comes with Savepoint (quickstart)")
    _set_option(plan)
    plan.add_argument("--json", action="store_true", help="print one JSON document and nothing else")

    evaluation = _verb(verbs, "eval", eval_verb, "let a model solve tasks, and report its success with intervals")
    evaluation.epilog = _eval_settings_help()
    evaluation.add_argument("model", help="folder of a policy (runs/NAME/checkpoints/stage4) or of a local transformers model; its name at an endpoint")
    evaluation.add_argument("--tasks", type=Path, required=True, metavar="FILE", help="task file, JSON lines (see `savepoint synth`)")
    databases = "folder that holds <db_id>.sqlite or <db_id>/<db_id>.sqlite; may be repeated"
    evaluation.add_argument("--databases", type=Path, required=True, action="append", metavar="DIR", help=databases)
    engines = "what generates: embedded (default), openai (any OpenAI-compatible endpoint), vllm (where it is installed)"
    evaluation.add_argument("--engine", choices=["embedded", "openai", "vllm"], default="embedded", help=engines)
    evaluation.add_argument("--base-url", metavar="URL", help="address of the endpoint, for example http://localhost:8000/v1 (default: OpenAI's own)")
    evaluation.add_argument("--samples", type=_positive, default=1, metavar="K", help="episodes a task (default 1); success is also given as pass@k and pass^k")
    evaluation.add_argument("--single-turn", action="store_true", help="no looking: the first message is graded")
    evaluation.add_argument("--temperature", type=float, default=1.0, help="sampling temperature, 0 for greedy (default 1)")
    longest = "tokens of a whole trajectory (default: the policy's own setting, else 8192, at an endpoint 65536)"
    evaluation.add_argument("--max-tokens", type=_positive, metavar="N", help=longest)
    evaluation.add_argument("--seed", type=int, default=0, help="seed of the sampling (default 0)")
    evaluation.add_argument("--out", type=Path, metavar="DIR", help="keep results, traces and the summary there")
    evaluation.add_argument("--resume", action="store_true", help="go on where the evaluation in --out was stopped")
    evaluation.add_argument("--traces", type=Path, metavar="FILE", help="write every trajectory there, JSON lines")
    _set_option(evaluation, "environment.schema_tokens=4000, endpoint.concurrency=32")
    _common(evaluation)

    synth = _verb(verbs, "synth", synth_verb, "make verified tasks from any SQLite database")
    synth.add_argument("database", help="a SQLite file, or one of the embedded databases: shop, clinic")
    synth.add_argument("-n", type=int, default=100, help="how many tasks (default 100)")
    synth.add_argument("--out", type=Path, required=True, metavar="FILE", help="task file to write, JSON lines")
    synth.add_argument("--task", choices=["debugging", "generation", "both"], default="debugging", help="what the tasks ask for (default debugging)")
    synth.add_argument("--forms", metavar="A,B", help="forms of query (default: all)")
    synth.add_argument("--bugs", metavar="A,B", help="kinds of bug (default: all)")
    synth.add_argument("--renamed-share", type=float, default=0.3, metavar="S", help="share of tasks on a schema migrated since (default 0.3)")
    synth.add_argument("--wording", choices=["plain", "brief"], default="plain", help="plain: full sentences; brief: what tiny models read (default plain)")
    synth.add_argument("--max-tables", type=_positive, default=50, help="use at most so many tables (default 50)")
    synth.add_argument("--max-columns", type=_positive, default=400, help="use at most so many columns (default 400)")
    synth.add_argument("--seed", type=int, default=0, help="same seed, same file (default 0)")
    synth.add_argument("--force", action="store_true", help="replace the file if it exists")
    _common(synth)

    shell = _verb(verbs, "shell", shell_verb, "a SQL shell on a leased session (.checkpoint, .restore, .fork, .reset ...); the file is never written")
    shell.add_argument("database", help="a SQLite file")
    _common(shell)

    doctor = _verb(verbs, "doctor", doctor_verb, "what works on this machine, and why not: compiler, VFS, store, torch, transformers")
    _common(doctor)
    return parser


def _verb(verbs: Any, name: str, function: Any, text: str, **more: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = verbs.add_parser(
        name, help=text, description=text[:1].upper() + text[1:] + ".", formatter_class=argparse.RawDescriptionHelpFormatter, **more
    )
    parser.set_defaults(verb=function)
    return parser


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--store", type=Path, metavar="DIR", help="where database images are kept (default: the user's cache, or $SAVEPOINT_STORE)")
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else")


def _set_option(parser: argparse.ArgumentParser, examples: str = "tasks.database=my.sqlite, stages.4.steps=60, profile=smoke") -> None:
    text = f"change a setting, e.g. {examples}"
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=text)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def _settings_help() -> str:
    """Every setting of a recipe, from the settings models themselves."""
    if not {"-h", "--help"} & set(sys.argv):
        return ""  # importing the models takes seconds, and only the help page shows them
    from savepoint.config import describe
    from savepoint.curriculum.plan import Recipe

    lines = ["settings of a recipe (TOML), each of which --set can change:"]
    for key, default, text in describe(Recipe):
        lines.append(f"  {key} = {default}\n      {text}")
    return "\n".join(lines)


def _eval_settings_help() -> str:
    """Every setting of `savepoint eval`."""
    if not {"-h", "--help"} & set(sys.argv):
        return ""
    from savepoint.config import describe
    from savepoint.evals.command import EvalSettings

    lines = ["settings, each of which --set can change (environment: by default those that the policy was trained with):"]
    for key, default, text in describe(EvalSettings):
        lines.append(f"  {key} = {default}\n      {text}")
    return "\n".join(lines)


def _print(result: Any) -> None:
    json.dump(result, sys.stdout, indent=1, ensure_ascii=False, allow_nan=False)
    print()


def run_verb(arguments: argparse.Namespace) -> int:
    """`savepoint run`."""
    from savepoint.config import build
    from savepoint.curriculum.estimate import estimate
    from savepoint.curriculum.pipeline import run_recipe
    from savepoint.curriculum.plan import Recipe, load_recipe
    from savepoint.evals.report import render_table, write_report
    from savepoint.progress import Progress

    if arguments.recipe is None:
        if not arguments.resume or arguments.out is None or arguments.set:
            raise UserError("run: name a recipe (for example quickstart), or go on with a stopped run by --out DIR --resume")
        stored = arguments.out / "recipe.json"
        if not stored.is_file():
            raise UserError(f"{arguments.out}: holds no run to go on with")
        recipe = build(Recipe, json.loads(stored.read_text(encoding="utf-8")), source=str(stored))
        profile = json.loads((arguments.out / "manifest.json").read_text(encoding="utf-8"))["profile"]
    else:
        recipe, profile = load_recipe(arguments.recipe, arguments.set)
    folder = arguments.out or Path("runs") / recipe.name
    expected = estimate(recipe)["stages"]
    stages = [(stage["name"], stage["steps"], stage["seconds"]) for stage in expected]
    with Progress(f"{recipe.name} on {recipe.tasks.file or recipe.tasks.database}, seed {recipe.seed}", stages=stages, quiet=arguments.json) as progress:
        summary = run_recipe(recipe, profile, folder, resume=arguments.resume, progress=progress, store=arguments.store)
    report = write_report(folder)
    if arguments.json:
        _print(summary | {"report": str(report)})
    else:
        render_table(summary)
        print(f"Report: {report}")
    return 0


def plan_verb(arguments: argparse.Namespace) -> int:
    """`savepoint plan`."""
    from savepoint.curriculum.estimate import estimate
    from savepoint.curriculum.plan import load_recipe
    from savepoint.tables import print_plan

    recipe, profile = load_recipe(arguments.recipe, arguments.set)
    plan = estimate(recipe) | {"profile": profile, "settings": recipe.model_dump(mode="json")}
    _print(plan) if arguments.json else print_plan(plan)
    return 0


def eval_verb(arguments: argparse.Namespace) -> int:
    """`savepoint eval`: status 1 when an episode failed for our reasons or the endpoint's."""
    from savepoint.evals.command import EvalOptions, evaluate_command
    from savepoint.progress import Progress
    from savepoint.tables import print_evaluation

    options = EvalOptions(
        engine=arguments.engine, samples=arguments.samples, mode="single_turn" if arguments.single_turn else "agentic", temperature=arguments.temperature,
        seed=arguments.seed, max_tokens=arguments.max_tokens, base_url=arguments.base_url, out=arguments.out, resume=arguments.resume,
        traces=arguments.traces, settings=arguments.set,
    )  # fmt: skip
    with Progress(f"evaluating {arguments.model}", stages=[], quiet=arguments.json) as progress:
        result = evaluate_command(arguments.model, arguments.tasks, arguments.databases, options, store=arguments.store, progress=progress)
    _print(result) if arguments.json else print_evaluation(result)
    return int("infra" in result["outcomes"])


def synth_verb(arguments: argparse.Namespace) -> int:
    """`savepoint synth`."""
    from savepoint.progress import Progress
    from savepoint.tables import print_synthesis

    with Progress(f"making tasks from {arguments.database}", quiet=arguments.json) as progress:
        result = _synthesise(arguments, lambda done: progress.activity("making tasks", done, arguments.n))
    _print(result) if arguments.json else print_synthesis(result)
    return 0


def _synthesise(arguments: argparse.Namespace, each: Callable[[int], None]) -> dict[str, Any]:
    from savepoint.envs.sql.synth import synth_command

    return synth_command(
        arguments.database, arguments.n, arguments.out, seed=arguments.seed, task=arguments.task, forms=_list(arguments.forms), kinds=_list(arguments.bugs),
        rename_share=arguments.renamed_share, wording=arguments.wording, max_tables=arguments.max_tables, max_columns=arguments.max_columns,
        force=arguments.force, store=arguments.store, each=each,
    )  # fmt: skip


def _list(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(item.strip() for item in text.split(",") if item.strip())


def shell_verb(arguments: argparse.Namespace) -> int:
    """`savepoint shell`."""
    from savepoint.shell import run_shell

    return run_shell(arguments.database, store=arguments.store, json_mode=arguments.json)


def doctor_verb(arguments: argparse.Namespace) -> int:
    """`savepoint doctor`: status 1 when something that training needs does not work."""
    from savepoint.doctor import examine
    from savepoint.tables import print_findings

    findings = examine(arguments.store)
    _print({"findings": findings}) if arguments.json else print_findings(findings)
    return 0 if all(finding["works"] or not finding["needed"] for finding in findings) else 1
