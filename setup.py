"""Packaging of z2all_ds. The card's top-level folder ds_configs/ travels inside the wheel as z2all_ds/ds_configs."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
VERSION = re.search(r'__version__ = "([^"]+)"', (ROOT / "z2all_ds/__init__.py").read_text(encoding="utf-8"))
assert VERSION

CORE = [
    "torch>=2.6",
    "deepspeed>=0.19,<0.20",
    "transformers>=5.17,<6",
    "tokenizers>=0.22",
    "safetensors>=0.5",
    "accelerate>=1.1",  # transformers wants it to load a folder into the partitions of ZeRO-3
    "pyarrow>=18",
    "wandb>=0.19",
    "pydantic>=2.10",
    "pyyaml>=6",
    "numpy>=1.26",
    "orjson>=3.10",  # records in and out of shards, three times as fast as the standard library
    "fsspec>=2024.2",  # corpora in object stores; each store's driver (s3fs, gcsfs ...) is installed by who needs it
    "jinja2>=3.1",  # chat templates
    "packaging>=23",  # the doctor compares what installed packages demand of each other
    "rich>=13",
    "typer>=0.15",
    "matplotlib>=3.9",  # the loss curve
    "ninja>=1.11",  # DeepSpeed builds its ops with it
    "setuptools>=70",  # torch's extension builder imports it, and new virtual environments lack it
]

EXTRAS = {
    # NVIDIA's apex cannot be named here: the package called apex on PyPI is something else (see the README).
    "gpu": [
        "flash-attn>=2.8",
        "xformers>=0.0.30",
        "liger-kernel>=0.5",
        "torchao>=0.9",
        "nvidia-ml-py>=12",
    ],
    "corpus": ["zstandard>=0.23", "datasketch>=2.0"],
    "tokenizer": ["sentencepiece>=0.2"],
    "ray": ["ray>=2.40"],
    "eval": ["lm-eval>=0.4.13", "datasets>=3"],
    "board": ["starlette>=0.40", "uvicorn>=0.30", "plotly>=6"],  # plotly for the charts' JavaScript that it carries
    "tensorboard": ["tensorboard>=2.17"],
    "fonts": ["mplfonts>=0.0.8"],  # for Chinese names in plots where the machine has no font that knows them
    "dev": [
        "z2all_ds[corpus,tokenizer,ray,eval,board,tensorboard]",
        "pytest>=8",
        "pytest-xdist>=3.7",
        "hypothesis>=6.100",
        "ruff>=0.9",
        "mypy>=1.14",
        "types-PyYAML",
        "build>=1.2",
        "psutil>=5.9",
        "playwright>=1.49",  # drives a browser that the system has
    ],
}

setup(
    name="z2all_ds",
    version=VERSION.group(1),
    description="From raw text to a Hugging Face checkpoint of a Llama-2-structure model, trained with DeepSpeed",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=[*find_packages(include=["z2all_ds", "z2all_ds.*"]), "z2all_ds.ds_configs"],
    package_dir={"z2all_ds.ds_configs": "ds_configs"},
    package_data={
        "z2all_ds": ["presets/*.yaml", "corpus/converters/*.txt", "track/board/page/*", "probes/*.yaml", "py.typed"],
        "z2all_ds.ds_configs": ["*.json", "README.md"],
    },
    install_requires=CORE,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["z2all = z2all_ds.__main__:main"]},
)
