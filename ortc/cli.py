"""The command line. Commands import what they need themselves, so that ``ortc --help`` is instant."""

from __future__ import annotations

import math
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ortc.errors import OrtcError, RecipeError

if TYPE_CHECKING:
    from ortc.parts import PartPlan
    from ortc.plan import Plan
    from ortc.recipe import Recipe

app = typer.Typer(
    name="ortc",
    help="Compiles a forward ONNX model into training graphs, offline, and trains them on ONNX Runtime.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Model = Annotated[Path, typer.Argument(metavar="MODEL.onnx", help="the forward model")]
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="an output folder of `ortc compile`")]
Losses = Annotated[
    list[str] | None,
    typer.Option("--loss", metavar="NAME[:k=v,…]", help="a loss, e.g. cross_entropy:axis=-1,ignore_index=0; repeat for a sum"),
]
Train = Annotated[list[str] | None, typer.Option("--train", metavar="GLOB", help="train only these weights")]
Freeze = Annotated[list[str] | None, typer.Option("--freeze", metavar="GLOB", help="do not train these weights")]
Wrt = Annotated[list[str] | None, typer.Option("--wrt", metavar="INPUT", help="also give the gradient of this data input")]
BatchNorm = Annotated[str | None, typer.Option("--batch-norm", metavar="batch|frozen", help="statistics used in training")]
TargetName = Annotated[str | None, typer.Option("--target", help="the runtime the graphs are for")]
RecipeFile = Annotated[Path | None, typer.Option("--recipe", metavar="ortc.toml", help="a recipe; flags override it")]
Rules = Annotated[
    list[Path] | None,
    typer.Option("--rules", metavar="FILE.py", help="a Python file with your own gradient rules"),
]
Gelu = Annotated[
    str | None,
    typer.Option(
        metavar="keep|exact|tanh|quick",
        help="the form of GELU that is trained, evaluated and exported: as the model has it, by erf, by tanh, by a sigmoid",
    ),
]
Connect = Annotated[
    list[str] | None,
    typer.Option(
        "--connect", metavar="[STAGE:]OUT=[STAGE:]IN", help="an output of one stage is an input of other name in later ones"
    ),
]
Renames = Annotated[
    list[str] | None,
    typer.Option(
        "--rename", metavar="OLD=NEW", help="names, with * for what stays, e.g. 'module.*=*'; the first that fits wins"
    ),
]
DataRenames = Annotated[
    list[str] | None, typer.Option("--rename", metavar="DATA=INPUT", help="an array of the data is this input")
]
Providers = Annotated[
    list[str] | None,
    typer.Option("--ep", metavar="NAME[:k=v,…]", help="execution providers, the first preferred: cuda,cpu; default: cpu"),
]
SessionOptions = Annotated[
    list[str] | None, typer.Option("--session-option", metavar="KEY=VALUE", help="an option of ONNX Runtime's sessions")
]
Threads = Annotated[int | None, typer.Option(min=1, help="threads of each session; default: all cores, which ranks share")]
Force = Annotated[bool, typer.Option("--force", help="replace what is there")]
Quiet = Annotated[bool, typer.Option("--quiet", help="print errors only")]


@app.command("compile")
def compile_(
    models: Annotated[list[Path], typer.Argument(metavar="MODEL.onnx", help="the forward model")],
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="DIR", help="the folder to make")] = None,
    recipe: RecipeFile = None,
    loss: Losses = None,
    train: Train = None,
    freeze: Freeze = None,
    wrt: Wrt = None,
    batch_norm: BatchNorm = None,
    lora: Annotated[
        str | None,
        typer.Option(metavar="rank=8,alpha=16,targets=GLOB", help="train low-rank adapters in place of these weights"),
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[:k=v,…]", help="adamw, adam, sgd, lamb, adafactor, lion, rmsprop, adagrad; e.g. adamw:beta2=0.95"
        ),
    ] = None,
    lr: Annotated[float | None, typer.Option(help="learning rate after the warm-up")] = None,
    schedule: Annotated[str | None, typer.Option(help="constant, linear, cosine or polynomial")] = None,
    warmup: Annotated[int | None, typer.Option(help="steps of linear warm-up")] = None,
    ema: Annotated[float | None, typer.Option(metavar="DECAY", help="keep a moving average of the weights, e.g. 0.999")] = None,
    clip_norm: Annotated[float | None, typer.Option(help="clip the gradients to this norm, all together")] = None,
    clip_value: Annotated[float | None, typer.Option(help="clip every element of the gradients to this size")] = None,
    fuse_update: Annotated[
        bool,
        typer.Option("--fuse-update", help="update each weight as its gradient comes: less memory; no step can be undone"),
    ] = False,
    precision: Annotated[str | None, typer.Option(metavar="fp32|fp16|bf16", help="type of products; weights stay fp32")] = None,
    gelu: Gelu = None,
    without: Annotated[
        list[str] | None, typer.Option("--without", metavar="PASS", help="leave an optional pass out (`ortc rewrite --list`)")
    ] = None,
    with_: Annotated[
        list[str] | None, typer.Option("--with", metavar="PASS", help="run a fusion that the target's table has off")
    ] = None,
    loss_scale: Annotated[str | None, typer.Option(metavar="none|dynamic|NUMBER", help="default: dynamic for fp16")] = None,
    recompute: Annotated[
        str | None,
        typer.Option(
            metavar="none|auto|full|LIST",
            help="what runs again in the backward: layers, gelu, attention, globs over node names",
        ),
    ] = None,
    memory_budget: Annotated[
        str | None, typer.Option(metavar="4GiB", help="bytes that a rank's tensors may take; recompute sees to it")
    ] = None,
    stash: Annotated[
        str | None,
        typer.Option(
            metavar="keep|packed", help="what the backward reads of the forward: packed keeps masks as bits, indices as bytes"
        ),
    ] = None,
    stash_dtype: Annotated[
        str | None,
        typer.Option(metavar="fp32|fp16|bf16|int8", help="type in which activations are kept; `ortc verify` says what it does"),
    ] = None,
    moments: Annotated[
        str | None, typer.Option(metavar="fp32|bf16", help="type in which the optimizer's first moments are stored")
    ] = None,
    stages: Annotated[int | None, typer.Option(min=1, help="parts of the model, for as many pipeline ranks")] = None,
    micro_batches: Annotated[
        int | None, typer.Option("--micro-batches", "--accumulate", min=1, help="parts of a batch; gradients add up over them")
    ] = None,
    pipeline: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="gpipe, 1f1b, interleaved, zb-h1, or a text file with your own")
    ] = None,
    stage_models: Annotated[
        bool, typer.Option("--stage-models", help="the models are stages of one, in order; values connect by name")
    ] = False,
    connect: Connect = None,
    rank: Annotated[
        int | None, typer.Option(min=0, help="compile this rank's stage alone, the model; --boundary tells of the others")
    ] = None,
    boundary: Annotated[
        Path | None, typer.Option(metavar="FILE.toml", help="what crosses between the stages; `ortc boundary` writes it")
    ] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="pipeline ranks, fewer than stages only for interleaved")] = None,
    data_parallel: Annotated[
        int | None, typer.Option(min=1, help="copies of all stages, each with its part of a batch")
    ] = None,
    zero: Annotated[
        int | None, typer.Option(min=0, max=1, help="1: the copies share the optimizer's state out, each keeps its part")
    ] = None,
    cut: Annotated[
        list[str] | None, typer.Option(metavar="TENSOR[,…]", help="tensors that end a stage; repeat for the next stage")
    ] = None,
    assign: Annotated[
        list[str] | None, typer.Option(metavar="GLOB=STAGE", help="nodes of a stage by name; the first that matches wins")
    ] = None,
    memory_limit: Annotated[str | None, typer.Option(metavar="4GiB", help="bytes that a rank may take")] = None,
    size: Annotated[
        list[str] | None, typer.Option(metavar="NAME=N", help="size of a symbolic dimension, for the predicted costs")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="seed of dropout and of the data order")] = None,
    target: TargetName = None,
    artifacts: Annotated[
        list[str] | None,
        typer.Option(metavar="ort", help="also write DIR/ort for ONNX Runtime's own on-device training API (C++, C#, Java, …)"),
    ] = None,
    rules: Rules = None,
    save_intermediate: Annotated[
        Path | None, typer.Option(metavar="DIR", help="write the graphs after every pass, without weights")
    ] = None,
    force: Force = False,
    write_recipe: Annotated[bool, typer.Option("--write-recipe", help="print the recipe in force as TOML and stop")] = False,
    quiet: Quiet = False,
) -> None:
    """Build the training graphs of a model."""
    schedule_text, sizes = read_pipeline(pipeline) if pipeline is not None else (None, {})
    chosen = build_recipe(
        recipe, loss=loss, train=train, freeze=freeze, wrt=wrt, batch_norm=batch_norm, lora=lora, optimizer=optimizer,
        lr=lr, schedule=schedule, warmup=warmup, seed=seed, target=target, ema=ema, clip_norm=clip_norm,
        clip_value=clip_value, fuse=fuse_update or None, precision=precision, loss_scale=loss_scale, gelu=gelu,
        without=without, with_=with_,
        recompute={"nodes": recompute, "budget": None if memory_budget is None else parse_bytes(memory_budget)},
        stash={"packed": parse_stash(stash), "dtype": stash_dtype}, moments=moments, artifacts=artifacts,
        pipeline={
            "stages": stages or (len(cut) + 1 if cut else sizes.get("stages")), "schedule": schedule_text,
            "micro_batches": micro_batches or sizes.get("micro_batches"), "ranks": ranks or sizes.get("ranks"),
            "replicas": data_parallel, "zero": zero, "cuts": cut or None, "assign": _pairs(assign, "--assign"),
            "memory_limit": None if memory_limit is None else parse_bytes(memory_limit), "sizes": _pairs(size, "--size"),
        },
    )  # fmt: skip
    if write_recipe:
        from ortc.recipe import dump_recipe

        print(dump_recipe(chosen), end="")
        return
    if output is None:
        raise RecipeError("say where the folder goes: -o DIR")
    from ortc.artifacts import compile, compile_stages

    if (rank is None) != (boundary is None) or (rank is not None and stage_models) or (connect and not stage_models):
        raise RecipeError(
            "--rank and --boundary go together, for one rank's own models; --connect goes with --stage-models, for all of them"
        )
    if rank is not None and save_intermediate is not None:
        raise RecipeError("--save-intermediate is for a whole model, not for one rank's")
    if rank is not None and boundary is not None:
        from ortc.boundary import load_boundary
        from ortc.parts import compile_part

        part = compile_part(models, output, load_boundary(boundary), rank, chosen, rules=rules or (), force=force)
        if not quiet:
            print(describe_part(part, output))
        return
    if stage_models:
        from ortc.boundary import parse_connections

        connections = parse_connections(connect or ())
        plan = compile_stages(
            models, output, chosen, connections=connections, rules=rules or (), save_intermediate=save_intermediate, force=force
        )
    elif len(models) > 1:
        raise RecipeError(f"{len(models)} models: give one, or --stage-models if they are the stages of one")
    else:
        plan = compile(models[0], output, chosen, rules=rules or (), save_intermediate=save_intermediate, force=force)
    if not quiet:
        print(describe_plan(plan, output))


@app.command()
def boundary(
    models: Annotated[list[Path], typer.Argument(metavar="STAGE.onnx …", help="the models of all stages, in order")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE.toml")],
    connect: Connect = None,
    force: Force = False,
) -> None:
    """Write what crosses between stages: with it each is compiled where it is (`ortc compile --rank`)."""
    from ortc.boundary import dump_boundary, parse_connections
    from ortc.passes.joining import Stages, describe
    from ortc.runtime.files import write_text

    if output.exists() and not force:
        raise RecipeError(f"{output} exists already; choose another name, or --force to replace it")
    if len(models) < 2:
        raise RecipeError("give the models of at least two stages, in order")
    found = describe(Stages(models, parse_connections(connect or ())))
    write_text(output, dump_boundary(found))
    ways = [f"  {v.name} from stage {v.source} to {', '.join(map(str, v.readers))}" for v in found.values]
    tied = [w.name for w in found.weights if w.tied]
    print(f"{output}: {len(ways)} values between {found.stages} stages", *ways, sep="\n")
    if tied:
        print(f"  tied weights: {', '.join(tied)}")
    print(f"next, where each model is: ortc compile MODEL.onnx --rank RANK --boundary {shlex.quote(str(output))} -o PART")


@app.command()
def join(
    parts: Annotated[list[Path], typer.Argument(metavar="PART …", help="the folders of all ranks, of `ortc compile --rank`")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="the folder to make")],
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Put ranks that were compiled apart together, after checking that they fit."""
    from ortc.parts import join_parts

    plan = join_parts(parts, output, force=force)
    if not quiet:
        print(describe_plan(plan, output))


@app.command()
def run(
    folder: Folder,
    data: Annotated[str, typer.Option(help=".npz, .parquet, a folder of such or .npy, a saved dataset, or module:function")],
    batch_size: Annotated[int, typer.Option(min=1)] = 32,
    steps: Annotated[int | None, typer.Option(min=1, help="train up to this step")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="passes over the data; default: 1")] = None,
    eval_data: Annotated[str | None, typer.Option(help="data to evaluate on")] = None,
    eval_every: Annotated[int | None, typer.Option(min=1, help="steps between evaluations; default: each epoch")] = None,
    save_every: Annotated[int | None, typer.Option(min=1, help="steps between checkpoints; default: each epoch")] = None,
    keep: Annotated[int, typer.Option(min=1, help="checkpoints to keep")] = 3,
    restore: Annotated[str, typer.Option(metavar="latest|best|PATH|none", help="where to continue from")] = "latest",
    lr: Annotated[float | None, typer.Option(help="learning rate; default: the recipe's")] = None,
    schedule: Annotated[str | None, typer.Option(help="constant, linear, cosine or polynomial")] = None,
    warmup: Annotated[int | None, typer.Option(min=0, help="steps of linear warm-up")] = None,
    seed: Annotated[int | None, typer.Option(help="seed of the data order and dropout; default: the recipe's")] = None,
    drop_last: Annotated[bool, typer.Option("--drop-last", help="drop an epoch's last partial batch")] = False,
    no_shuffle: Annotated[bool, typer.Option("--no-shuffle", help="take the samples in their stored order")] = False,
    eval_batch_size: Annotated[int | None, typer.Option(min=1, help="default: --batch-size")] = None,
    threads: Threads = None,
    timeout: Annotated[
        float,
        typer.Option(min=0, metavar="SECONDS", help="how long a rank waits for another; then the run ends; 0: for ever"),
    ] = 1800,
    metrics: Annotated[Path | None, typer.Option(help="JSON-lines file; default: DIR/metrics.jsonl")] = None,
    profile: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="write a Chrome/Perfetto trace of the last step, predicted and measured"),
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option("--metric", metavar="NAME|FILE.onnx", help="evaluate accuracy, perplexity, f1, or your own graph"),
    ] = None,
    best: Annotated[
        str | None,
        typer.Option(metavar="[min:|max:]NAME", help="keep the best checkpoint by this (--restore best)"),
    ] = None,
    patience: Annotated[int | None, typer.Option(min=1, help="stop after so many evaluations without a better one")] = None,
    tensorboard: Annotated[Path | None, typer.Option(metavar="DIR", help="write TensorBoard event files")] = None,
    histograms: Annotated[
        list[str] | None, typer.Option("--histograms", metavar="GLOB", help="with histograms and norms of these weights")
    ] = None,
    histogram_every: Annotated[int, typer.Option(min=1, help="steps between histograms")] = 100,
    fetch: Annotated[
        list[str] | None, typer.Option("--fetch", metavar="NAME", help="write this value of the training graph, DIR/fetched/")
    ] = None,
    fetch_every: Annotated[int, typer.Option(min=1, help="steps between fetches")] = 1,
    rename: DataRenames = None,
    ep: Providers = None,
    session_option: SessionOptions = None,
    ort_profile: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="write ONNX Runtime's own traces, as one for Perfetto"),
    ] = None,
    log_every: Annotated[int | None, typer.Option(min=1, help="steps between lines, in place of a progress bar")] = None,
    quiet: Quiet = False,
    json: Annotated[bool, typer.Option("--json", help="print the lines of the metrics file, and nothing else")] = False,
) -> None:
    """Train; continues where it stopped."""
    from ortc.runtime.run import run as run_training

    if quiet and json:
        raise RecipeError("--quiet and --json exclude each other")
    names = dict(_named(text, "--rename") for text in rename or ())

    code = run_training(
        folder, data=data, batch_size=batch_size, steps=steps, epochs=epochs, eval_data=eval_data, eval_every=eval_every,
        save_every=save_every, keep=keep, restore=restore, lr=lr, schedule=schedule, warmup=warmup, seed=seed,
        drop_last=drop_last, shuffle=not no_shuffle, eval_batch_size=eval_batch_size, threads=threads, timeout=timeout,
        metrics=metrics,
        profile=profile, metric=metric or (),
        best=best, patience=patience, tensorboard=tensorboard, histograms=histograms or (), histogram_every=histogram_every,
        fetch=fetch or (), fetch_every=fetch_every, rename=names, providers=ep or (), session_options=session_option or (),
        ort_profile=ort_profile, log_every=log_every, quiet=quiet, json=json,
    )  # fmt: skip
    raise typer.Exit(code)


@app.command()
def predict(
    folder: Folder,
    data: Annotated[str, typer.Option(help="as for `ortc run`, without targets; the samples come in their stored order")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE.npz", help="an array for each output of the model")],
    restore: Annotated[str, typer.Option(metavar="latest|best|PATH|none", help="whose weights")] = "latest",
    only: Annotated[list[str] | None, typer.Option("--only", metavar="NAME", help="write this output of the model")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="the weights themselves, not their moving average (--ema)")] = False,
    batch_size: Annotated[int, typer.Option(min=1)] = 32,
    rename: DataRenames = None,
    threads: Threads = None,
    ep: Providers = None,
    session_option: SessionOptions = None,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Write the model's outputs for data without targets, with the trained weights."""
    from ortc.runtime.predict import predict

    names = dict(_named(text, "--rename") for text in rename or ())
    result = predict(
        folder, output, data=data, batch_size=batch_size, restore=restore, raw=raw, outputs=only or None, rename=names,
        threads=threads, providers=ep or (), session_options=session_option or (), force=force,
    )  # fmt: skip
    if result is not None and not quiet:
        print(result)


@app.command("import-weights")
def import_weights(
    folder: Folder,
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help=".safetensors, PyTorch's .pt (no code runs), .h5, or ONNX Runtime's checkpoint"),
    ],
    rename: Renames = None,
    transpose: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="the file has these parameters of the model transposed")
    ] = None,
    cast: Annotated[bool, typer.Option("--cast", help="convert floats of another precision")] = False,
    partial: Annotated[bool, typer.Option("--partial", help="leave parameters that the file lacks as they are")] = False,
    force: Annotated[bool, typer.Option("--force", help="also where a run has saved checkpoints; they stay")] = False,
    quiet: Quiet = False,
) -> None:
    """Start from the weights in a file of another tool."""
    from ortc.runtime.exchange import import_weights

    result = import_weights(
        folder, file, rename=_renames(rename), transpose=transpose or (), cast=cast, partial=partial, force=force
    )
    if not quiet:
        print(result)


@app.command("export-weights")
def export_weights(
    folder: Folder,
    output: Annotated[
        Path,
        typer.Option("-o", "--output", metavar="FILE", help=".safetensors, .pt, .h5, or .ckpt for ONNX Runtime's checkpoint"),
    ],
    checkpoint: Annotated[str, typer.Option(metavar="latest|PATH|none", help="whose weights")] = "latest",
    format_: Annotated[
        str | None, typer.Option("--format", metavar="NAME", help="safetensors, pytorch, hdf5 or ort; default: by the ending")
    ] = None,
    rename: Renames = None,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Write the weights into a file for another tool, under the model's names."""
    from ortc.runtime.exchange import export_weights

    source = export_weights(folder, output, which=checkpoint, kind=format_, rename=_renames(rename), force=force)
    if not quiet:
        print(f"{output}: weights of {source}")


@app.command()
def export(
    folder: Folder,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE.onnx")],
    data: Annotated[
        str | None, typer.Option(help="data to check the export on; default: the last run's, if it is there, else made up")
    ] = None,
    rename: DataRenames = None,
    adapters: Annotated[
        Path | None,
        typer.Option(metavar="FILE.onnx_adapter", help="write the adapters (--lora) apart; the model takes them as inputs"),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="the weights themselves, not their moving average (--ema)")] = False,
    restore: Annotated[str, typer.Option(metavar="latest|best|PATH", help="the checkpoint to export")] = "latest",
    force: Force = False,
) -> None:
    """Write the original model with the trained weights, as a plain inference model, and check it."""
    from ortc.runtime.trainer import Trainer

    with Trainer(folder, restore=restore) as trainer:
        names = dict(_named(text, "--rename") for text in rename or ())
        result = trainer.export(output, data=data, force=force, adapters=adapters, raw=raw, rename=names)
    print(result)


@app.command()
def grad(
    model: Model,
    data: Annotated[
        Path | None, typer.Option(help="one batch: arrays by input name, targets under `labels`; --check makes one up")
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="GRADS.npz", help="where the gradients go")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="compare with finite differences in float64; exit code 1 if a gradient is wrong")
    ] = False,
    parameters: Annotated[
        list[str] | None, typer.Option("--parameters", metavar="GLOB", help="check only these parameters")
    ] = None,
    recipe: RecipeFile = None,
    loss: Losses = None,
    train: Train = None,
    freeze: Freeze = None,
    wrt: Wrt = None,
    batch_norm: BatchNorm = None,
    target: TargetName = None,
    rules: Rules = None,
    force: Force = False,
) -> None:
    """Loss and gradients of one batch, to compare with anything else, or with finite differences."""
    chosen = build_recipe(recipe, loss=loss, train=train, freeze=freeze, wrt=wrt, batch_norm=batch_norm, target=target)
    if check == (output is not None):
        raise RecipeError("say one of the two: -o GRADS.npz to write the gradients, or --check to compare them")
    if output is not None and data is None:
        raise RecipeError("say which batch: --data BATCH.npz")
    from ortc.grad import check_gradients, write_gradients

    if output is not None and data is not None:
        print(write_gradients(model, data, output, chosen, rules=rules or (), force=force))
    elif not check_gradients(model, data, chosen, parameters=parameters or (), rules=rules or ()):
        raise typer.Exit(1)


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(metavar="MODEL.onnx|DIR", help="a model, or an output folder")],
    recipe: RecipeFile = None,
    loss: Losses = None,
    train: Train = None,
    freeze: Freeze = None,
    batch_norm: BatchNorm = None,
    rules: Rules = None,
    timeline: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="of a folder: write the predicted step as a Chrome/Perfetto trace")
    ] = None,
    schedule: Annotated[
        Path | None, typer.Option(metavar="FILE.txt", help="of a folder: write its schedule as text, to edit")
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(metavar="REPORT.html", help="of a folder: write one page with all of it, to open in a browser"),
    ] = None,
    profile: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="TRACE.json", help="with --html: what `ortc run --profile` or ONNX Runtime measured; repeat for both"
        ),
    ] = None,
    metrics: Annotated[
        Path | None, typer.Option(metavar="FILE.jsonl", help="with --html: of past runs; default: DIR/metrics.jsonl")
    ] = None,
    size: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=N", help="with --html: size of a symbolic dimension, for what is predicted"),
    ] = None,
) -> None:
    """List every weight with its fate and the reason; of an output folder its graphs, stages and schedule too."""
    from ortc.inspection import inspect_folder, inspect_model

    if html is None and (profile or metrics or size):
        raise RecipeError("--profile, --metrics and --size go with --html, for the page")
    if path.is_dir():
        if html is not None:
            from ortc.report import write_report

            write_report(path, html, profiles=profile or (), metrics=metrics, sizes=_pairs(size, "--size"))
            print(f"{html}: open it in a browser")
        if html is None or timeline or schedule:
            inspect_folder(path, timeline, schedule)
    elif timeline or schedule or html:
        raise RecipeError(f"--timeline, --schedule and --html are of an output folder of `ortc compile`, which {path} is not")
    else:
        inspect_model(path, build_recipe(recipe, loss=loss, train=train, freeze=freeze, batch_norm=batch_norm), rules or ())


@app.command()
def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="a model, or an output folder")],
    b: Annotated[Path, typer.Argument(metavar="B", help="another")],
) -> None:
    """What is different between two models or output folders, as graphs; exit code 1 if anything is."""
    from ortc.diff import diff as compare

    difference = compare(a, b)
    print(difference)
    if difference:
        raise typer.Exit(1)


@app.command()
def explain(
    folder: Folder,
    name: Annotated[str, typer.Argument(metavar="TENSOR|NODE", help="its name, in the model or in any compiled graph")],
) -> None:
    """Where a tensor or a node came from, what it is, why it is kept, cast or frozen, and who reads it."""
    from ortc.explain import explain as text_of

    print(text_of(folder, name))


@app.command()
def verify(
    folder: Folder,
    model: Annotated[
        Path | None, typer.Option(metavar="MODEL.onnx", help="the model it was compiled from; default: what the folder exports")
    ] = None,
    data: Annotated[Path | None, typer.Option(metavar="BATCH.npz", help="one batch; default: made up")] = None,
    rules: Rules = None,
    threads: Threads = None,
) -> None:
    """Check on this machine that the compiled graphs compute what the model does; exit code 1 if one does not."""
    from ortc.verify import report
    from ortc.verify import verify as checks_of

    if not report(checks_of(folder, model, data, rules=rules or (), threads=threads)):
        raise typer.Exit(1)


@app.command()
def simulate(
    folder: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="an output folder; without: equal stages, as the flags say")
    ] = None,
    stages: Annotated[int | None, typer.Option(min=1, help="how many equal stages")] = None,
    micro_batches: Annotated[int | None, typer.Option(min=1, help="parts of a batch; default: the folder's")] = None,
    pipeline: Annotated[
        list[str] | None,
        typer.Option(
            "--pipeline", "--schedule", metavar="NAME|FILE",
            help="gpipe, 1f1b, interleaved, zb-h1, or a file with your own; repeat to compare; default: the folder's, or all",
        ),
    ] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="pipeline ranks; default: one a stage")] = None,
    forward: Annotated[float | None, typer.Option(min=0, help="time of a stage's forward, in any unit; default: 1")] = None,
    backward: Annotated[float | None, typer.Option(min=0, help="time of its backward; default: 2")] = None,
    weight: Annotated[
        float | None, typer.Option(min=0, help="the part of the backward for the weights' gradients; default: half")
    ] = None,
    transfer: Annotated[float | None, typer.Option(min=0, help="time from rank to rank; default: 0")] = None,
    stash: Annotated[
        str | None, typer.Option(metavar="100MB", help="bytes that a stage keeps of a micro-batch until its backward")
    ] = None,
    static: Annotated[
        str | None, typer.Option(metavar="4GiB", help="bytes of a stage's parameters, gradients and optimizer states")
    ] = None,
) -> None:  # fmt: skip
    """Predict time, bubble and memory of a step, for worlds of any size."""
    from ortc.forecast import Pipeline, equal_cases, folder_cases, report

    asked = [Pipeline(name, *read_pipeline(name)) for name in pipeline or ()]
    numbers: dict[str, Any] = {"forward": forward, "backward": backward, "weight": weight, "transfer": transfer}
    numbers |= {"stash": stash and parse_bytes(stash), "static": static and parse_bytes(static)}
    given = {name: number for name, number in numbers.items() if number is not None}
    if folder is None:
        cases = equal_cases(stages, micro_batches, asked, ranks, **given)
    elif given or stages is not None:
        flag = next(iter(given), "stages")
        raise RecipeError(f"--{flag} is for a simulation without a folder: {folder} says it itself")
    else:
        cases = folder_cases(folder, asked, micro_batches, ranks)
    print(report(cases, in_seconds=folder is not None))


@app.command()
def ops(
    model: Annotated[Path | None, typer.Argument(metavar="[MODEL.onnx]", help="only the operators of this model")] = None,
    rules: Rules = None,
) -> None:
    """List the operators: which have gradients, in which inputs, and how the others are dealt with."""
    from ortc.inspection import list_operators

    list_operators(model, rules or ())


@app.command()
def rewrite(
    model: Annotated[Path | None, typer.Argument(metavar="[MODEL.onnx]", help="any model; needless with --list")] = None,
    passes: Annotated[
        list[str] | None, typer.Option("--pass", metavar="NAME[,NAME]", help="what to run, in the order of a compilation")
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE.onnx", help="the file to write")] = None,
    show: Annotated[bool, typer.Option("--list", help="say which passes there are, and stop")] = False,
    gelu: Gelu = None,
    target: TargetName = None,
    recipe: RecipeFile = None,
    rules: Rules = None,
    force: Force = False,
) -> None:
    """Run single passes on a model; the result computes the same (or what --gelu chooses)."""
    chosen = build_recipe(recipe, gelu=gelu, target=target)
    from ortc.inspection import list_passes, summarise_rewrites
    from ortc.standalone import rewrite_model

    if show:
        print(list_passes(chosen))
        return
    if model is None or output is None:
        raise RecipeError("say which model and where the result goes: ortc rewrite MODEL.onnx --pass NAME -o FILE.onnx")
    names = [name for text in passes or () for name in text.split(",")]
    c = rewrite_model(model, output, names, chosen, rules=rules or (), force=force)
    print("\n".join([f"{output}: {len(c.graph)} nodes", *summarise_rewrites(c.rewrites), *c.warnings]))
    if any(node.domain == "ortc" for node in c.graph.all_nodes()):
        print("it holds operators of ortc's own; `--pass lower` beside the others writes them in the standard's")


@app.command()
def demo(
    folder: Annotated[Path | None, typer.Argument(metavar="DIR", help="where to keep the result; default: nowhere")] = None,
    threads: Threads = None,
) -> None:
    """Compile, train, evaluate and export a small model of handwritten digits."""
    from ortc.demo.run import run_demo

    run_demo(folder, threads)


def build_recipe(
    path: Path | None,
    *,
    loss: list[str] | None = None,
    train: list[str] | None = None,
    freeze: list[str] | None = None,
    wrt: list[str] | None = None,
    batch_norm: str | None = None,
    lora: str | None = None,
    optimizer: str | None = None,
    lr: float | None = None,
    schedule: str | None = None,
    warmup: int | None = None,
    seed: int | None = None,
    target: str | None = None,
    ema: float | None = None,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    fuse: bool | None = None,
    precision: str | None = None,
    loss_scale: str | None = None,
    recompute: dict[str, Any] | None = None,
    stash: dict[str, Any] | None = None,
    moments: str | None = None,
    gelu: str | None = None,
    without: list[str] | None = None,
    with_: list[str] | None = None,
    artifacts: list[str] | None = None,
    pipeline: dict[str, Any] | None = None,
) -> Recipe:
    """A recipe file (or the defaults) with the flags that were given on top.

    Raises:
        RecipeError: naming the field.
    """
    from ortc.recipe import Recipe, load_recipe, parse_recipe

    fields: dict[str, Any] = (load_recipe(path) if path else Recipe()).model_dump()
    if loss:
        fields["loss"] = [parse_loss(text) for text in loss]
    if lora is not None:
        fields["lora"] = {**(fields["lora"] or {}), **parse_lora(lora)}
    if optimizer:
        name, options = split_options(optimizer)
        fields["optimizer"] = {**fields["optimizer"], "name": name, "options": options}
    tables = (
        (fields["parameters"], {"train": train or None, "freeze": freeze or None}),
        (fields["learning_rate"], {"base": lr, "schedule": schedule, "warmup": warmup}),
        (fields["optimizer"], {"ema": ema, "max_norm": clip_norm, "max_value": clip_value, "fuse": fuse, "moments": moments}),
        (fields["precision"], {"type": precision}),
        (fields["precision"]["loss_scale"], _loss_scale(loss_scale)),
        (fields["recompute"], recompute or {}),
        (fields["stash"], stash or {}),
        (fields["pipeline"], pipeline or {}),
        (fields, {"wrt": wrt or None, "batch_norm": batch_norm, "seed": seed, "target": target, "gelu": gelu}),
        (fields, {"artifacts": artifacts or None}),
        (fields["passes"], {"off": without or None, "on": with_ or None}),
    )
    for table, flags in tables:
        table.update({key: value for key, value in flags.items() if value is not None})
    return parse_recipe(fields)


def read_pipeline(name: str) -> tuple[str, dict[str, int]]:
    """A schedule by its name, or the text of a file, with the numbers of stages, ranks and micro-batches that it is for.

    Raises:
        RecipeError: there is neither, or the file holds no schedule.
    """
    from ortc.runtime.schedule import SCHEDULES, size_of

    if name in SCHEDULES:
        return name, {}
    try:
        text = Path(name).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RecipeError(f"there is no schedule {name!r}, and no such file: take one of {', '.join(SCHEDULES)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"cannot read the schedule {name}: {error}") from None
    try:
        return text, size_of(text)
    except RecipeError as error:
        raise RecipeError(f"{name}: {error}") from None


def _renames(texts: list[str] | None) -> dict[str, str]:
    """``OLD=NEW``, several times."""
    rules = dict(text.partition("=")[::2] for text in texts or ())
    if not all(rules) or any("=" not in text for text in texts or ()):
        raise RecipeError(
            f"--rename: {next(t for t in texts or () if not t.partition('=')[0] or '=' not in t)!r} is not OLD=NEW"
        )
    return rules


def _pairs(texts: list[str] | None, flag: str) -> dict[str, int] | None:
    """``NAME=NUMBER``, several times."""
    pairs: dict[str, int] = {}
    for text in texts or ():
        name, equals, number = text.rpartition("=")
        if not equals or not name or not number.isdecimal():
            raise RecipeError(f"{flag}: {text!r} is not NAME=NUMBER")
        pairs[name] = int(number)
    return pairs or None


def _named(text: str, flag: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name or not value:
        raise RecipeError(f"{flag}: {text!r} is not NAME=NAME")
    return name, value


def parse_stash(text: str | None) -> bool | None:
    """``keep`` or ``packed``: whether masks and indices are packed."""
    if text not in (None, "keep", "packed"):
        raise RecipeError(f"--stash: {text!r} is neither keep nor packed")
    return None if text is None else text == "packed"


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_bytes(text: str) -> int:
    """``4GiB``, ``500MB`` or a plain number of bytes.

    Raises:
        RecipeError: if it is neither.
    """
    number = text.rstrip("BbGgiIKkMm ")
    unit = text[len(number) :].strip().upper()
    try:
        count = int(float(number) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        count = -1
    if count < 0:
        raise RecipeError(f"{text!r} is no size: write it like 4GiB, 500MB or 1000000")
    return count


def _loss_scale(text: str | None) -> dict[str, Any]:
    """``dynamic``, ``none``, or the number of a static one."""
    if text is None or text in ("none", "dynamic", "auto"):
        return {"mode": text}
    try:
        return {"mode": "static", "initial": float(text)}
    except ValueError:
        raise RecipeError(f"--loss-scale: {text!r} is neither none, dynamic nor a number") from None


def parse_lora(text: str) -> dict[str, Any]:
    """``rank=8,alpha=16,targets='*attn*'`` as the recipe's table; several targets as ``targets=[GLOB,GLOB]``."""
    _, options = split_options(f"lora:{text}") if text else ("", {})
    if text and not options:
        raise RecipeError(f"--lora: {text!r} is not KEY=VALUE,…: rank, alpha and targets can be said")
    targets = options.get("targets")
    if isinstance(targets, str):
        options["targets"] = [glob.strip(" '\"") for glob in targets.strip("[]").split(",")]
    return options


def parse_loss(text: str) -> dict[str, Any]:
    """``cross_entropy:axis=1,output=logits`` as a loss term of the recipe."""
    name, options = split_options(text)
    term: dict[str, Any] = {key: options.pop(key) for key in ("output", "labels", "weight") if key in options}
    return {"name": name, **term, "options": options}


def split_options(text: str) -> tuple[str, dict[str, Any]]:
    """``name:key=value,key=[1,2]`` taken apart; a colon that is part of a file's name stays in the name."""
    name, colon, tail = text.rpartition(":")
    if not colon or "=" not in tail:
        return text, {}
    options: dict[str, Any] = {}
    depth, start = 0, 0
    for end, character in enumerate(tail + ","):
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            key, equals, value = tail[start:end].partition("=")
            if not equals:
                raise RecipeError(f"{text!r}: {tail[start:end]!r} is not KEY=VALUE")
            options[key.strip()] = _value(value.strip())
            start = end + 1
    return name, options


def _value(text: str) -> Any:
    import json

    try:
        return json.loads(text)
    except ValueError:
        return text


def describe_plan(plan: Plan, output: Path) -> str:
    """What was compiled, in a few lines: what was chosen, and how to choose otherwise."""
    from ortc.inspection import gelu_lines, recompute_lines, schedule_name, stage_lines, stash_lines, summarise_rewrites

    trained = plan.trainable()
    count = sum(math.prod(p.shape) for p in trained)
    held = sum(math.prod(p.shape) for p in plan.parameters)
    folder = shlex.quote(str(output))
    lines = [f"{output}: training graphs of {plan.model} for {plan.target} (opset {plan.opset})"]
    for loss in plan.losses:
        target = f", targets in {loss.labels!r}" if loss.labels else ""
        lines.append(f"  loss        {loss.name} of output {loss.output!r}{target}: {loss.chosen} (--loss changes it)")
    lines.append(f"  parameters  {len(trained)} train, {count:,} of {held:,} values (`ortc inspect {folder}` lists them)")
    rate = plan.recipe.learning_rate
    fused = " in the training graph" if plan.fused else ""
    lines.append(
        f"  optimizer   {plan.recipe.optimizer.name}{fused}, learning rate {rate.base:g}, {rate.schedule} (--optimizer, --lr)"
    )
    lines += gelu_lines(plan) + summarise_rewrites(plan.rewrites)
    pipeline = plan.recipe.pipeline
    if pipeline.divided:
        ranks = (pipeline.ranks or pipeline.stages) * pipeline.replicas
        how = f"{pipeline.stages} stages, schedule {schedule_name(plan)}, " if pipeline.stages > 1 else ""
        lines.append(
            f"  pipeline    {how}{pipeline.parts} micro-batches, {ranks} ranks (--stages, --micro-batches, --pipeline)"
        )
        lines += stage_lines(plan)
    lines += recompute_lines(plan)
    lines += stash_lines(plan)
    inputs = _data_inputs(plan)
    if pipeline.stages > 1:
        where = (f"{name} (stage {', '.join(map(str, stages))})" for name, stages in inputs.items())
        lines.append(f"  inputs      {', '.join(where)}")
    if plan.artifacts:
        lines.append(f"  also        {plan.artifacts[0].file.partition('/')[0]}/ for ONNX Runtime's own on-device training API")
    lines += [f"warning: {text}" for text in plan.warnings]
    lines.append(f"next: ortc run {folder} --data train.npz")
    return "\n".join(lines)


def _data_inputs(plan: Plan) -> dict[str, list[int]]:
    """The arrays that a batch has, with the stages that read them."""
    found: dict[str, list[int]] = {}
    for stage in plan.stages:
        ports = [p for graph in stage.phases.values() for p in graph.inputs if p.role in ("data", "label")]
        for name in dict.fromkeys(p.of or p.name for p in ports):
            found.setdefault(name, []).append(stage.index)
    return found


def describe_part(part: PartPlan, output: Path) -> str:
    """What was compiled of one rank, in a few lines."""
    folder = shlex.quote(str(output))
    lines = []
    for piece in part.pieces:
        stage = piece.stage
        trained = [p for p in piece.parameters if p.trainable]
        lines.append(f"{output}: stage {stage.index} of {part.boundary.stages}, {piece.model}, for {part.target}")
        lines.append(f"  parameters  {len(trained)} train, {sum(math.prod(p.shape) for p in trained):,} values")
        ports = stage.phases["forward"]
        for what, values in (
            ("inputs", ports.inputs),
            ("targets", ports.inputs),
            ("reads", ports.inputs),
            ("sends", ports.outputs),
        ):
            role = {"inputs": "data", "targets": "label"}.get(what, "boundary")
            names = [p.of or p.name for p in values if p.role == role]
            if names:
                lines.append(f"  {what:<11} {', '.join(names)}")
        lines += [f"warning: {text}" for text in piece.warnings]
    lines.append(f"next, with the parts of all ranks: ortc join {folder} … -o stages/")
    return "\n".join(lines)


def main() -> None:
    """The console script: a user's mistake ends with one message and exit code 2."""
    try:
        app()
    except OrtcError as error:
        print(f"ortc: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("ortc: interrupted", file=sys.stderr)
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
