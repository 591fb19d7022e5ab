"""Chat templates: programs from a stranger's file, so they run in a sandbox, in a process of their own, within limits."""

import json
import re
import subprocess
import sys
from contextlib import suppress
from datetime import datetime
from typing import Any

TIME_LIMIT_S = 5.0
MEMORY_LIMIT_BYTES = 1 << 30  # Linux only; elsewhere the time limit bounds it
OUTPUT_LIMIT_CHARS = 2_000_000


class TemplateError(ValueError):
    """A chat template that is missing, wrong, hostile or too costly; the message is one line."""


def render(template: str, variables: dict[str, Any]) -> str:
    """The text a chat template writes for `variables`, in at most TIME_LIMIT_S seconds and OUTPUT_LIMIT_CHARS characters.

    A loop inside a template cannot be interrupted from its own process, so the template runs in a child that can be ended.

    Raises: TemplateError, one line, whatever the template does.
    """
    request = json.dumps({"template": template, "variables": variables}).encode()
    try:
        child = subprocess.run([sys.executable, "-P", __file__], input=request, capture_output=True, timeout=TIME_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise TemplateError(f"the chat template ran longer than {TIME_LIMIT_S:g} s and was stopped; encode plain text instead") from None
    try:
        answer = json.loads(child.stdout)
    except ValueError:
        answer = {"error": f"its process ended with status {child.returncode}, most likely out of memory"}
    if "error" in answer:
        raise TemplateError(f"the chat template failed: {answer['error']}; encode plain text instead")
    return answer["text"]


def _environment() -> Any:
    """Jinja's sandbox as transformers sets it up: nothing to write to, no attribute that starts with an underscore."""
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Sandbox(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(("*", "**"))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            sizes = [abs(value) if isinstance(value, (int, float)) else len(value) for value in (left, right)]
            numbers = isinstance(left, (int, float)) and isinstance(right, (int, float))  # these take no room
            if operator == "**" or (not numbers and sizes[0] * sizes[1] > OUTPUT_LIMIT_CHARS):
                raise TemplateError(f"it asks for {operator} on values of size {sizes[0]:.3g} and {sizes[1]:.3g}")
            return super().call_binop(context, operator, left, right)

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, **{"ensure_ascii": False, **options})
    return environment


def _render_here(template: str, variables: dict[str, Any]) -> str:
    """Render in this process, counting characters as they come."""
    template = re.sub(r"({%[-+]?\s*)(end)?generation(?=\s*[-+]?%})", lambda m: m[1] + ("endif" if m[2] else "if true"), template)  # training's mark
    pieces, size = [], 0
    for piece in _environment().from_string(template).generate(**variables):
        pieces.append(piece)
        size += len(piece)
        if size > OUTPUT_LIMIT_CHARS:
            raise TemplateError(f"it writes more than {OUTPUT_LIMIT_CHARS:,} characters")
    return "".join(pieces)


def _child() -> None:
    """Read one request from stdin, answer with one JSON object; any failure is one line."""
    with suppress(ImportError, ValueError, OSError):  # POSIX has this limit; a template asks for gigabytes in three characters
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    try:
        answer = {"text": _render_here(**json.load(sys.stdin.buffer))}
    except MemoryError:
        answer = {"error": f"it needs more than {MEMORY_LIMIT_BYTES >> 20:,} MiB of memory"}
    except Exception as error:
        answer = {"error": " ".join(f"{'' if isinstance(error, TemplateError) else type(error).__name__ + ': '}{error}".split())[:200]}
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    _child()
