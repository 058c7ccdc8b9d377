"""What `uv pip install` and `uv pip uninstall` leave in site-packages, without a network.

    python uv_stand_in.py SITE_PACKAGES SGLANG pip install OPTION… REQUIREMENT…

SGLANG is the folder that SGLang's package is copied from.
"""

import base64
import hashlib
import json
import re
import shutil
import sys
from pathlib import Path

WITH_VALUE = {
    "--python",
    "--torch-backend",
    "--index",
    "--only-binary",
    "--override",
    "--prerelease",
}
WITH_VALUE |= {"--config-settings", "--constraint", "--requirement", "--reinstall-package"}

PROJECTS = {"Megatron-LM": "megatron-core", "slime": "slime"}

# What their builds add to the folder beside the package itself.
BUILT = {
    "apex": [f"{name}.cpython-312.so" for name in ("apex_C", "amp_C", "fused_layer_norm_cuda")],
    "flash-attn": ["flash_attn_2_cuda.cpython-312.so"],
    "torch-memory-saver": ["torch_memory_saver_hook_mode_preload_cu13.abi3.so"],
}
BROUGHT = {
    "transformer-engine": ["transformer-engine-torch==2.11.0", "transformer-engine-cu13==2.11.0"],
    "turnleaf": ["aiohttp", "boto3", "orjson", "starlette", "transformers", "typer", "uvicorn"],
    "sglang": ["sglang-kernel"],
}


def install(packages: Path, sglang: Path, arguments: list[str]) -> None:
    requirements, pins, index = [], {}, 0
    while index < len(arguments):
        word, index = arguments[index], index + 1
        if word == "--editable":
            path = arguments[index].partition("[")[0]
            name = PROJECTS.get(Path(path).name, "turnleaf")
            put(packages, name, "0.1.0", url=f"file://{path}")
            if name == "megatron-core":
                (Path(path) / "megatron/core/datasets").mkdir(parents=True, exist_ok=True)
                (Path(path) / "megatron/core/datasets/helpers_cpp.cpython-312.so").touch()
            requirements += BROUGHT.get(name, [])
        elif word == "--constraint":
            lines = Path(arguments[index]).read_text().split()
            pins = dict(line.split("==") for line in lines)
        elif word == "--requirement":
            lines = Path(arguments[index]).read_text().splitlines()
            requirements += [line.partition("#")[0].strip() for line in lines]
        elif not word.startswith("-"):
            requirements.append(word)
        index += word in WITH_VALUE or word == "--editable"
    for requirement in filter(None, requirements):
        require(packages, sglang, requirement, pins)


def require(packages: Path, sglang: Path, requirement: str, pins: dict[str, str]) -> None:
    bare, _, url = requirement.partition(" @ ")
    match = re.fullmatch(r"([A-Za-z0-9._-]+)(?:\[.*\])?(?:(==|<|>=)(.+))?", bare)
    assert match is not None, requirement
    name, relation, bound = match.groups()
    name = name.replace("_", "-").lower()
    if relation == "<":
        version = pins.get(name, "0.1")
    else:
        version = bound or pins.get(name, "1.0")
    if name == "torch":
        version += "+cu130"
    put(packages, name, version, url=url)
    for file in BUILT.get(name, []):
        (packages / file).touch()
    if name == "sglang":
        shutil.copytree(sglang, packages / "sglang")
    for other in BROUGHT.get(name, []):
        require(packages, sglang, other, pins)


def put(packages: Path, name: str, version: str, *, url: str = "") -> None:
    """A distribution of one module, in the place of what was there of it."""
    stem = name.replace("-", "_")
    for old in packages.glob(f"{stem}-*.dist-info"):
        shutil.rmtree(old)
    folder = packages / f"{stem}-{version}.dist-info"
    folder.mkdir()
    module = packages / f"{stem}.py"
    module.write_text(f"version = {version!r}\n")
    digest = base64.urlsafe_b64encode(hashlib.sha256(module.read_bytes()).digest()).rstrip(b"=")
    record = f"{module.name},sha256={digest.decode()},{module.stat().st_size}\n"
    (folder / "RECORD").write_text(record + f"{folder.name}/RECORD,,\n")
    if url.startswith("git+"):
        address, _, commit = url.removeprefix("git+").rpartition("@")
        origin = {"url": address, "vcs_info": {"vcs": "git", "commit_id": commit}}
        (folder / "direct_url.json").write_text(json.dumps(origin))
    elif url:
        (folder / "direct_url.json").write_text(json.dumps({"url": url.replace(" ", "%20")}))


if __name__ == "__main__":
    packages, sglang, pip, command, *arguments = sys.argv[1:]
    assert pip == "pip"
    if command == "install":
        install(Path(packages), Path(sglang), arguments)
    else:
        assert command == "uninstall"
        for old in Path(packages).glob(f"{arguments[-1].replace('-', '_')}-*.dist-info"):
            shutil.rmtree(old)
