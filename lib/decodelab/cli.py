"""`decodelab`: the course's formula and measurements from a shell. Results on stdout, progress on stderr."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial

from decodelab.arithmetic import catalog, cost, engines, published, units
from decodelab.arithmetic.catalog import Workload
from decodelab.arithmetic.records import finite
from decodelab.serving import endpoint, simulator

EPILOG = "Every number is decimal: GB is 1e9 bytes. The formulas are in decodelab/arithmetic/cost.py; lesson 00 explains the words."


def say(line: str) -> None:
    """Progress, on stderr so that --json stays one document."""
    print(line, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; 2 and a single line on stderr where its input is wrong."""
    arguments = parser().parse_args(argv)
    try:
        result, text = arguments.run(arguments)
    except (LookupError, ValueError, ArithmeticError, OSError) as fault:  # the library's own errors, each one clear line
        say(f"decodelab {arguments.command}: {fault}")
        return 2
    except KeyboardInterrupt:
        say(f"decodelab {arguments.command}: stopped; nothing half-measured was kept")
        return 130
    try:
        print(json.dumps(finite(result), indent=1) if arguments.json else text, flush=True)
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line, with help that teaches."""
    top = argparse.ArgumentParser(prog="decodelab", description="Predict what one more token costs, then measure it.", epilog=EPILOG)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    card = _command(commands, "machine", run_machine, "measure this machine's card: the formula's constants, on random buffers (about 30 s)")
    _measured(card)
    card.add_argument("--remeasure", action="store_true", help="measure again although a card is kept in ~/.decodelab")
    _estimate_options(
        _command(
            commands, "estimate", run_estimate, "a request's time from shapes alone: the datasheet floor, and `likely` with an engine's constants"
        )
    )
    growth = _command(
        commands, "growth", run_growth, "measure t(n) = a + b*n: how a step grows with the tokens in the cache, predicted beside measured"
    )
    growth.add_argument("--model", default="gpt2", help="shape, with random weights (default gpt2, whose MHA cache grows fast)")
    growth.add_argument("--contexts", default="128,1024,4096,8192", help="tokens in the cache, comma-separated (default 128,1024,4096,8192)")
    growth.add_argument("--batch", type=int, default=1, help="sequences per step (default 1)")
    _measured(growth, budget_s=20.0)
    saturation = _command(
        commands, "saturation", run_saturation, "read bandwidth reached against bytes per step, and tokens/s against batch up to the ridge"
    )
    _measured(saturation, budget_s=20.0)
    drafts = _command(
        commands, "speculate", run_speculate, "decode texts of ten kinds with drafts and without: acceptance, and the speed-up predicted and measured"
    )
    drafts.add_argument("--task", nargs="+", action="extend", metavar="NAME", help="copy, code, json, json_unmasked, ... (default: all)")
    drafts.add_argument("--k", type=int, metavar="DRAFTS", help="drafts per round (default: each task's own); 0 is plain decoding")
    _measured(drafts, budget_s=45.0)
    validate = _command(commands, "validate", run_validate, "the cost model against published decode speeds, each row predicted with itself left out")
    validate.add_argument("--rows", metavar="FILE", help="a CSV with the columns of data/measured_decode.csv: fit on the shipped rows, predict these")
    simulator.options(
        _command(
            commands,
            "simulate",
            partial(simulator.command, say=say),
            "the scheduler on a virtual clock: many requests, many devices, priced by the formula",
        )
    )
    endpoint.options(
        _command(
            commands, "serve-check", partial(endpoint.command, say=say), "load a running OpenAI-compatible server and measure what its users feel"
        )
    )
    return top


def _estimate_options(estimate: argparse.ArgumentParser) -> None:
    estimate.add_argument("--model", required=True, help="a name from data/models.csv, such as llama-3.1-8b")
    estimate.add_argument("--hardware", required=True, help="a name from data/hardware.csv, such as h200-sxm; `here` is this machine's card")
    estimate.add_argument("--prompt", type=int, required=True, metavar="TOKENS", help="tokens read: one pass, prefill")
    estimate.add_argument(
        "--output", type=int, required=True, metavar="TOKENS", help="tokens written: the first by prefill, each other by one decode step"
    )
    estimate.add_argument("--batch", type=int, default=1, help="sequences that share each step's weight reads (default 1)")
    estimate.add_argument("--dtype", default="bfloat16", help=f"format of the weights (default bfloat16): {', '.join(catalog.DTYPE_BYTES)}")
    estimate.add_argument("--kv-dtype", help="format of the KV cache (default: 16 bits, or the weights' format if that is float32)")


def _command(commands, name: str, run: Callable, summary: str) -> argparse.ArgumentParser:  # noqa: ANN001
    command = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".", epilog=EPILOG)
    command.add_argument("--json", action="store_true", help="one JSON document on stdout")
    command.set_defaults(run=run)
    return command


def _measured(command: argparse.ArgumentParser, *, budget_s: float | None = None) -> None:
    command.add_argument("--dtype", default="float32", help="float32 (default), bfloat16, float16 or int8 (weights)")
    command.add_argument("--path", default="auto", help="fast (compiled), eager, or auto (default): fast where it compiles")
    command.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    if budget_s:
        command.add_argument("--budget", type=float, default=budget_s, metavar="SECONDS", help=f"seconds for the timed steps (default {budget_s:g})")


def _torch_dtype(arguments: argparse.Namespace) -> str:
    """The dtype and device of a measurement, checked before anything is allocated."""
    from decodelab.decoder import weights

    weights.check_device(arguments.device)
    weights.check_dtype(name := catalog.dtype_name(arguments.dtype), arguments.device)
    return name


def run_machine(arguments: argparse.Namespace) -> tuple[dict, str]:
    """`decodelab machine`."""
    from decodelab.measuring import machine

    card = machine.card(_torch_dtype(arguments), device=arguments.device, path=arguments.path, remeasure=arguments.remeasure, say=say)
    return card.to_json(), str(card)


def run_estimate(arguments: argparse.Namespace) -> tuple[dict, str]:
    """`decodelab estimate`."""
    config, dtype = catalog.model(arguments.model), catalog.dtype_name(arguments.dtype)
    kv_dtype = catalog.dtype_name(arguments.kv_dtype or ("float32" if dtype == "float32" else "bfloat16"))
    work = Workload(prompt_tokens=arguments.prompt, output_tokens=arguments.output, batch=arguments.batch,
                    weight_bytes_per_value=catalog.dtype_bytes(dtype), kv_bytes_per_value=catalog.dtype_bytes(kv_dtype))  # fmt: skip
    known = None if arguments.hardware == "here" else catalog.hardware(arguments.hardware)
    if work.slots > config.max_context:
        fits = config.max_context - arguments.prompt + 1
        advice = f"Ask for at most {fits:,} output tokens." if fits > 0 else f"Shorten the prompt to at most {config.max_context:,} tokens."
        raise ValueError(f"prompt {arguments.prompt:,} + output {arguments.output:,} - 1 = {work.slots:,} tokens, but {config.name} has "
                         f"{config.max_context:,} positions. {advice}")  # fmt: skip
    if known is None:
        from decodelab.measuring import machine

        card = machine.card(dtype, say=say)
        if not arguments.kv_dtype:  # int8 keeps K and V in what this machine computes in
            work, kv_dtype = replace(work, **card.formats), "float32" if card.formats["kv_bytes_per_value"] == 4 else kv_dtype
        name, floor, likely, engine = card.machine.processor, card.floor(), card.constants(config), "this machine's card"
    else:
        engine_class = engines.engine_for(known)
        name, floor, engine = known.name, cost.floor_constants(known, dtype=dtype), engine_class.name
        likely = engine_class.constants(known, dtype=dtype)
        _warn_if_too_large(config, known, work)
    at_floor, expected = cost.request_time(config, floor, work), cost.request_time(config, likely, work)
    unknown_peak = known is not None and known.flops_per_s(dtype) is None
    if unknown_peak:
        say(f"note: no source gives {name}'s {dtype} peak, so the floor counts prefill as memory traffic alone, and `likely` gives decode only.")
        expected = replace(expected, ttft_s=None, total_s=None, decode_share=None, free_prefill_saves_fraction=None)
    result = {"model": config.name, "hardware": name, "dtype": dtype, "kv_dtype": kv_dtype, **asdict(work), **asdict(at_floor),
              "likely": {"engine": engine, **asdict(expected)}}  # fmt: skip
    return result, _estimate_text(result)


def _warn_if_too_large(config: catalog.ModelConfig, hardware: catalog.Hardware, work: Workload) -> None:
    """One line on stderr where weights and cache together exceed the memory; the estimate is still what one device would take."""
    held = cost.parameters(config) * work.weight_bytes_per_value
    held += work.batch * cost.kv_bytes(config, context=work.slots, dtype_bytes=work.kv_bytes_per_value)
    if hardware.memory_gb and held > hardware.memory_gb * units.GB:
        say(f"note: weights and KV take {units.format_bytes(held)} and one {hardware.name} has {hardware.memory_gb:g} GB: "
            "this is the time if it did fit. Use fewer bytes per weight, or more devices.")  # fmt: skip


def _estimate_text(result: dict) -> str:
    seconds = units.format_seconds
    shown = {"time to first token": ("ttft_s", seconds), "first decode step": ("itl_first_s", seconds), "last decode step": ("itl_last_s", seconds),
             "decode": ("decode_s", seconds), "whole request": ("total_s", seconds), "decode share": ("decode_share", units.format_percent),
             "a free prefill saves": ("free_prefill_saves_fraction", units.format_percent)}  # fmt: skip
    head = f"{result['model']} {result['dtype']} on {result['hardware']}, {result['prompt_tokens']:,} in, {result['output_tokens']:,} out, batch {result['batch']}"
    lines = [head, f"{'':<22}{'floor':>12}{'likely':>12}   (likely: {result['likely']['engine']})"]
    lines += [f"{label:<22}" + "".join("           -" if part[key] is None else f"{form(part[key]):>12}" for part in (result, result["likely"]))
              for label, (key, form) in shown.items()]  # fmt: skip
    return "\n".join([*lines, f"KV reads equal weight reads at {units.significant(result['crossover_tokens'], 6)} tokens of context"])


def run_growth(arguments: argparse.Namespace) -> tuple[dict, str]:
    """`decodelab growth`."""
    from decodelab.decoder import weights
    from decodelab.measuring import experiments, machine

    config, dtype = catalog.model(arguments.model), _torch_dtype(arguments)
    contexts = experiments.growth_contexts(_counts(arguments.contexts), batch=arguments.batch)
    weights.require_runnable(config)
    card = machine.fresh_card(dtype, device=arguments.device, path=arguments.path, say=say)
    say(f"timing decode steps of {config.name} at {', '.join(map(str, contexts))} tokens")
    result = experiments.growth(config, card, contexts=contexts, batch=arguments.batch, budget_s=arguments.budget)
    lines = [f"{config.name}, batch {arguments.batch}, {card.title()}", f"{'tokens in cache':>16}{'step':>12}   n"]
    lines += [
        f"{context:>16,}{units.format_seconds(step.median_s):>12}{step.n:>4}" for context, step in zip(result.contexts, result.steps, strict=True)
    ]
    lines += [f"{'':<18}{'floor':>12}{'predicted':>12}{'measured':>12}"]
    for name, part in (("a per step", result.a_s), ("b per token", result.b_s_per_token)):
        lines.append(f"{name:<18}" + "".join(f"{units.format_seconds(value):>12}" for value in (part.floor, part.predicted, part.measured)))
    return result.to_json(), "\n".join([*lines, f"r2 {result.r2:.4f}; KV reads equal weight reads at {result.crossover_tokens:,.0f} tokens"])


def _counts(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{text!r} is not a comma-separated list of whole numbers, such as 128,1024,4096") from None


def run_saturation(arguments: argparse.Namespace) -> tuple[dict, str]:
    """`decodelab saturation`."""
    from decodelab.measuring import experiments, machine

    card = machine.fresh_card(_torch_dtype(arguments), device=arguments.device, path=arguments.path, say=say)
    result = experiments.saturation(card, budget_s=arguments.budget)
    lines = [card.title(), f"{'bytes per step':>16}{'batch':>7}{'step':>12}{'read':>12}{'arithmetic':>16}{'tokens/s':>10}"]
    lines += [f"{units.format_bytes(point.bytes_per_step):>16}{point.batch:>7}{units.format_seconds(point.step_s):>12}"
              f"{units.format_bandwidth(point.read_bytes_per_s):>12}{units.format_flop_rate(point.flops_per_s):>16}{point.batch / point.step_s:>10.0f}"
              for point in result.points]  # fmt: skip
    return result.to_json(), "\n".join([*lines, f"roof {units.format_bandwidth(result.roof_bytes_per_s)}, ridge at batch {result.ridge_batch:.1f}"])


def run_speculate(arguments: argparse.Namespace) -> tuple[dict, str]:
    """`decodelab speculate`."""
    from decodelab.measuring import speculation

    result = speculation.run(arguments.task or speculation.SETTINGS, k=arguments.k, dtype=_torch_dtype(arguments), path=arguments.path,
                             device=arguments.device, budget_s=arguments.budget, say=say)  # fmt: skip
    return result.to_json(), str(result)


def run_validate(arguments: argparse.Namespace) -> tuple[dict, str]:
    """`decodelab validate`."""
    result = published.validate(rows=arguments.rows)
    return result, published.table(result)


if __name__ == "__main__":
    sys.exit(main())
