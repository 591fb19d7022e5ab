"""vLLM 0.32 on the CPU, SmolLM2-135M in bfloat16: what the client measures is what the server counts."""

import pytest
from real_servers import agrees, fetch, keep, names_are_served, serve_check, serving

pytestmark = pytest.mark.timeout(1200)
LOADS = {
    "one at a time, 1:8": "--requests 16 --prompt-tokens 32 --output-tokens 256",
    "four at a time, 1:8": "--requests 16 --prompt-tokens 32 --output-tokens 256 --concurrency 4",
    "chat, Poisson arrivals": "--requests 12 --prompt-tokens 64 --output-tokens 64 --chat --rate 1",
}


def test_client_and_server_agree(peers, tmp_path):
    with serving("vllm_cpu.sh", peers, "vllm", log=tmp_path / "server.log") as url:
        runs = [serve_check(url, *load.split(), server="vLLM 0.32.0, bfloat16", folder=tmp_path) for load in LOADS.values()]
        names_are_served("vllm", fetch(f"{url}/metrics"))
    for run in runs:
        agrees(run)
    keep("vllm_cpu.json", runs)
