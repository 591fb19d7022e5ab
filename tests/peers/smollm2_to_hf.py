"""Writes the lab model as a Hugging Face folder, dequantised to float32, with its tokenizer: what vLLM and Dynamo serve.

python tests/peers/smollm2_to_hf.py FOLDER      in the course's own environment, after `python course.py test` has fetched the model
"""

import sys
from pathlib import Path

from transformers import AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "benchmarks"))

import model_files  # noqa: E402
from decodelab.decoder import weights  # noqa: E402


def main(folder: Path) -> None:
    """Weights from our own loader; the tokenizer and its chat template as transformers reads them from the same file."""
    source = ROOT / "data" / "models" / weights.LAB_MODEL
    model_files.write_folder(weights.load(source, dtype="float32", path="eager", say=lambda _: None), folder)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
