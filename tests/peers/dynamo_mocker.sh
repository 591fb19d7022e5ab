#!/usr/bin/env bash
# NVIDIA Dynamo without a GPU: a real frontend and router before workers that only pretend to compute. Their times are simulated;
# the serving path, the hand-over from prefill to decode included, is real.
#   dynamo_mocker.sh setup VENV
#   dynamo_mocker.sh serve VENV MODEL_DIR PORT agg|disagg     ready when GET /v1/models lists the model (about 25 s)
# MODEL_DIR gives the tokenizer and the config. All end together. WORKER_METRICS=PORT (below 32767, Dynamo's limit) serves the workers' own
# metrics on loopback, those of a decode worker beside prefill at PORT+1.
set -eu
case $1 in
setup)
  python3 -m venv "$2"
  "$2/bin/pip" install -q --no-deps ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1
  "$2/bin/pip" install -q aiohttp certifi 'kubernetes<33' msgspec prometheus-client 'pydantic<=2.13.5' pyzmq 'redis<9' tqdm 'transformers>=4.56' zstandard uvloop
  ;;
serve)
  plane="--discovery-backend file --request-plane tcp --event-plane zmq"
  case ${5:-disagg} in agg) workers=agg ;; disagg) workers="prefill decode" ;; *) echo "unknown mode $5: agg or disagg" >&2; exit 2 ;; esac
  DYN_FILE_KV=$(mktemp -d); export DYN_FILE_KV HF_HUB_OFFLINE=1
  children= number=${WORKER_METRICS:-}
  trap 'kill $children 2>/dev/null || true; rm -rf "$DYN_FILE_KV"' EXIT
  trap 'exit 143' INT TERM
  for worker in $workers; do
    DYN_SYSTEM_HOST=127.0.0.1 DYN_SYSTEM_PORT=${number:--1} "$2/bin/python" -m dynamo.mocker --model-path "$3" --model-name smollm2 --disaggregation-mode "$worker" $plane &
    children="$children $!"
    if [ -n "$number" ]; then number=$((number + 1)); fi
  done
  "$2/bin/python" -m dynamo.frontend --http-host 127.0.0.1 --http-port "$4" $plane &
  children="$children $!"
  wait -n
  ;;
esac
