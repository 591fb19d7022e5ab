"""Dynamo 1.6.1, a real frontend before workers that pretend to compute: one worker for all, then one for prefill and one for decode."""

import pytest
from real_servers import agrees, fetch, keep, names_are_served, serve_check, serving

pytestmark = pytest.mark.timeout(600)
LOADS = {
    "one at a time, 1:8": "--requests 16 --prompt-tokens 32 --output-tokens 256",
    "four at a time, 1:8": "--requests 16 --prompt-tokens 32 --output-tokens 256 --concurrency 4",
    "chat, Poisson arrivals": "--requests 16 --prompt-tokens 64 --output-tokens 64 --chat --rate 4",
}


@pytest.mark.parametrize(("mode", "record"), [("agg", "dynamo_mocker.json"), ("disagg", "dynamo_mocker_disagg.json")])
def test_client_and_server_agree(peers, tmp_path, mode, record):
    with serving("dynamo_mocker.sh", peers, "dynamo", mode, log=tmp_path / "server.log") as url:
        server = f"Dynamo 1.6.1, mock workers, {'aggregated' if mode == 'agg' else 'prefill and decode apart'}"
        runs = [serve_check(url, *load.split(), server=server, folder=tmp_path) for load in LOADS.values()]
        names_are_served("dynamo", fetch(f"{url}/metrics"))
    for run in runs:
        agrees(run)
    keep(record, runs)
