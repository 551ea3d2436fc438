"""Tiny random checkpoints of every family the tests serve, and versions of them published without a trainer.

    folder = write_checkpoint(tmp_path / "base", "qwen3", tied=True)
    with Versions(folder, tmp_path / "stream") as versions:
        versions.sparse(seed=1)                        # version 1: about 1% of every tensor
        versions.dense(seed=2)                         # version 2: every element of every tensor
        versions.special(seed=3)                       # version 3: NaN payloads, -0.0, infinities, subnormals
        versions.edit({"model.norm.weight": (np.array([0, 5]), np.array([0x3F80, 0x8000]))})
        versions.bits(2)["model.norm.weight"]          # what must be served at version 2, as unsigned integers
        versions.write(2, tmp_path / "at-2")           # the same as a checkpoint, for a fresh engine

The oracle is numpy: every version's bits are a copy that was edited by index, and `write` puts them into a plain
safetensors file. Neither uses anything of torch_delta. Importing this module imports neither torch nor vLLM.
"""

from __future__ import annotations

import json
import math
import shutil
import struct
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from safetensors import deserialize

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from pathlib import Path

Bits = np.ndarray[Any, np.dtype[Any]]
State = dict[str, Bits]

VOCAB_SIZE = 251  # odd, and no multiple of anything that vLLM pads to
_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
_HEAD = {"head_dim": 32}
_MOE = {"num_experts_per_tok": 2}
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", _HEAD),
    "llama": ("LlamaConfig", _HEAD),
    "gemma2": ("Gemma2Config", _HEAD | {"sliding_window": 64, "query_pre_attn_scalar": 32}),
    "qwen3_moe": ("Qwen3MoeConfig", _HEAD | _MOE | {"num_experts": 4, "moe_intermediate_size": 64}),
    "mixtral": ("MixtralConfig", _HEAD | _MOE | {"num_local_experts": 4, "intermediate_size": 64}),
    "mamba": ("MambaConfig", {"state_size": 16}),
    "falcon": ("FalconConfig", {"new_decoder_architecture": True, "num_kv_heads": 2}),
}
FAMILIES = tuple(_FAMILIES)
ALWAYS_TIED = frozenset({"gemma2", "falcon"})
"""Families whose checkpoints never hold a head of their own."""
PARAMETERS_ONLY = frozenset({"mamba"})
"""Families whose kernels vLLM's CPU build lacks: they load, and their parameters can be compared, but not generate."""
NEVER_TIED = frozenset({"qwen3_moe", "mixtral"})
"""Families that exist only untied, and are tested so."""

_WIDTH = {"BF16": 2, "F16": 2, "F32": 4}
_QUIET_NAN = {"BF16": 0x7FC0, "F16": 0x7E00, "F32": 0x7FC00000}
_INFINITY = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000}
_SIGN = {"BF16": 0x8000, "F16": 0x8000, "F32": 0x80000000}


def write_checkpoint(
    folder: Path,
    family: str,
    *,
    tied: bool = False,
    dtype: str = "BF16",
    num_files: int = 1,
    seed: int = 0,
    **config: Any,
) -> Path:
    """Write a checkpoint of `family` with random weights that make greedy decoding depend on all of them.

    Args:
        folder: created; the config, a tokenizer whose words are "t0 t1 ...", and the weights go there.
        family: one of `FAMILIES`.
        tied: whether the embedding serves as the head too; then the checkpoint has no `lm_head.weight`.
        dtype: of all weights, as safetensors spells it.
        num_files: weight files to spread the tensors over.
        seed: of the weights.
        config: fields of the transformers config to set otherwise (hidden_size, num_hidden_layers, ...).

    Returns:
        The folder.
    """
    import torch
    import transformers

    assert not (tied and family in NEVER_TIED), f"{family} is not served tied"
    name, fields = _FAMILIES[family]
    settings = _SHAPE | fields | {"tie_word_embeddings": tied or family in ALWAYS_TIED} | config
    made = getattr(transformers, name)(**settings)
    folder.mkdir(parents=True)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16)
    model.generation_config.do_sample = False
    model.save_pretrained(folder)
    _write_tokenizer(folder, made.vocab_size)
    _rewrite_dtype(folder / "config.json", {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}[dtype])
    shapes = {tensor: bits.shape for tensor, bits in read_checkpoint(folder)[0].items()}
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    rng = np.random.default_rng(seed)
    own_head = "lm_head.weight" in shapes
    state = {
        tensor: to_bits(_random(rng, tensor, shape, own_head=own_head), dtype)
        for tensor, shape in sorted(shapes.items())
    }
    write_weights(folder, state, dict.fromkeys(state, dtype), num_files)
    return folder


def _random(rng: np.random.Generator, name: str, shape: tuple[int, ...], *, own_head: bool) -> np.ndarray:
    """Float32 values of a size at which every tensor matters to the output: biases are not zero, norms not one."""
    values = rng.standard_normal(shape, dtype=np.float32)
    if name.endswith(("A_log", ".D")):
        return 0.5 + 0.1 * values
    if len(shape) == 1:
        return 0.1 * values + (0.0 if name.endswith(("bias", "b")) else 1.0)
    fan_in = math.prod(shape[1:])
    if "embed" in name:  # where it is the head too, a large one would only repeat the last token
        return values if own_head else 0.03 * values
    return 1.5 * values / np.float32(math.sqrt(fan_in))


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{token}": token for token in range(vocab_size)}, unk_token="t2"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokens = {"bos_token": "t0", "eos_token": "t1", "pad_token": "t2", "unk_token": "t2"}
    PreTrainedTokenizerFast(tokenizer_object=words, **tokens).save_pretrained(folder)


def _rewrite_dtype(path: Path, dtype: str) -> None:
    config = json.loads(path.read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    path.write_text(json.dumps(config | {"dtype": dtype}, indent=1), encoding="utf-8")


# -- bits and files, without the package under test --------------------------------------------------------------------


def to_bits(values: np.ndarray, dtype: str) -> Bits:
    """Bits of float32 values in `dtype`; round to nearest even, NaNs stay NaNs."""
    if dtype == "F16":
        return values.astype("<f2").view("<u2")
    words = np.ascontiguousarray(values, "<f4").view("<u4")
    if dtype == "F32":
        return words.copy()
    rounded = (words + np.uint32(0x7FFF) + ((words >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), words >> np.uint32(16) | np.uint32(0x40), rounded).astype("<u2")


def read_checkpoint(folder: Path) -> tuple[State, dict[str, str]]:
    """Bits and dtype of every tensor in every weight file of `folder`."""
    state: State = {}
    dtypes: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, entry in deserialize(path.read_bytes()):
            width = _WIDTH[entry["dtype"]]
            state[name] = np.frombuffer(bytes(entry["data"]), f"<u{width}").reshape(entry["shape"]).copy()
            dtypes[name] = entry["dtype"]
    return state, dtypes


def write_weights(folder: Path, state: State, dtypes: Mapping[str, str], num_files: int = 1) -> None:
    """Write tensors as one `model.safetensors`, or round-robin over several files with the usual index."""
    names = sorted(state)
    files = ["model.safetensors"]
    if num_files > 1:
        files = [f"model-{number + 1:05d}-of-{num_files:05d}.safetensors" for number in range(num_files)]
        where = {name: files[place % num_files] for place, name in enumerate(names)}
        total = sum(bits.nbytes for bits in state.values())
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    for number, file in enumerate(files):
        (folder / file).write_bytes(_file(names[number::num_files], state, dtypes))


def _file(names: Sequence[str], state: State, dtypes: Mapping[str, str]) -> bytes:
    """A safetensors file with these tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in names:
        bits = state[name]
        header[name] = {"dtype": dtypes[name], "shape": bits.shape, "data_offsets": [at, at + bits.nbytes]}
        at += bits.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([struct.pack("<Q", len(text)), text, *(state[name].tobytes() for name in names)])


# -- versions ----------------------------------------------------------------------------------------------------------


class Versions:
    """Publishes versions of a checkpoint, and knows the bits of each.

    Publishing uses the package (`attach_source` over a `TensorSource`); what a version must be does not.

    Args:
        base: checkpoint folder to start from; never written.
        url: root of the stream to make, a new folder or a URL.
        config: of the publisher; None for one that publishes on demand.
    """

    def __init__(self, base: Path, url: str | Path, *, config: Any = None) -> None:
        from torch_delta import PublishConfig

        self.base = base
        self.url = str(url)
        state, self.dtypes = read_checkpoint(base)
        self._states = [state]
        self._config = config if config is not None else PublishConfig(every=None)
        self._publisher = self._attach()

    @property
    def version(self) -> int:
        """The newest version."""
        return len(self._states) - 1

    def bits(self, version: int | None = None) -> State:
        """Unsigned bits of every checkpoint tensor at a version, by default the newest; not to be written to."""
        return self._states[self.version if version is None else version]

    def edit(self, changes: Mapping[str, tuple[Any, Any]]) -> int:
        """Publish a version that sets elements: tensor name -> (flat indices, bits). Returns its number."""
        state = {name: bits.copy() for name, bits in self.bits().items()}
        for name, (index, value) in changes.items():
            flat = state[name].reshape(-1)
            flat[np.asarray(index)] = np.asarray(value).astype(flat.dtype)
        self._states.append(state)
        report = self._publisher.wait(self._publisher.publish())
        assert report.version == self.version, (report, self.version)
        return self.version

    def sparse(self, seed: int, *, fraction: float = 0.01, names: Collection[str] | None = None) -> int:
        """Publish a version that changes about `fraction` of every tensor (at least one element), by a few ULPs.

        First and last element and the edges of every row block are always among them: shards end there.
        """
        rng = np.random.default_rng(seed)
        changes = {}
        for name in self._chosen(names):
            flat = self.bits()[name].reshape(-1)
            index = rng.choice(flat.size, max(1, int(fraction * flat.size)), replace=False)
            index = np.unique(
                np.concatenate([index, [0, flat.size // 2 - 1, flat.size // 2, flat.size - 1]]) % flat.size
            )
            changes[name] = (index, flat[index] ^ rng.integers(1, 8, index.size).astype(flat.dtype))
        return self.edit(changes)

    def dense(self, seed: int, *, names: Collection[str] | None = None) -> int:
        """Publish a version in which every element of the chosen tensors (default all) has other bits."""
        rng = np.random.default_rng(seed)
        changes = {}
        for name in self._chosen(names):
            flat = self.bits()[name].reshape(-1)
            changes[name] = (np.arange(flat.size), flat ^ rng.integers(1, 16, flat.size).astype(flat.dtype))
        return self.edit(changes)

    def special(self, seed: int, *, names: Collection[str] | None = None) -> int:
        """Publish a version with NaNs of several payloads, both zeros, infinities and a subnormal in every tensor."""
        rng = np.random.default_rng(seed)
        changes = {}
        for name in self._chosen(names):
            flat, dtype = self.bits()[name].reshape(-1), self.dtypes[name]
            nan, infinity, sign = _QUIET_NAN[dtype], _INFINITY[dtype], _SIGN[dtype]
            wanted = [nan, nan | sign, nan | 1, infinity | 1, sign, 0, infinity, infinity | sign, 1]
            index = rng.choice(flat.size, min(flat.size, len(wanted)), replace=False)
            changes[name] = (index, np.array(wanted[: index.size]))
        return self.edit(changes)

    def nothing(self) -> int:
        """Publish a version that changes nothing."""
        return self.edit({})

    def restart(self, version: int) -> None:
        """A trainer that starts again from an older version: the stream goes on in a successor, from version 0."""
        assert version < self.version, "else the stream just goes on"
        self._publisher.close()
        self._states = [self._states[version]]
        self._publisher = self._attach()

    def _attach(self) -> Any:
        from torch_delta import TensorSource, attach_source
        from torch_delta.publish.base import open_base

        source = TensorSource(self._walk, open_base(self.base).schema)
        return attach_source(source, self.url, base=self.base, config=self._config)

    def write(self, version: int, folder: Path, *, num_files: int = 1) -> Path:
        """Write a version as a checkpoint with plain numpy and safetensors; returns the folder."""
        folder.mkdir(parents=True)
        for path in self.base.iterdir():
            if ".safetensors" not in path.name:
                shutil.copy(path, folder / path.name)
        write_weights(folder, self.bits(version), self.dtypes, num_files)
        return folder

    def close(self) -> None:
        """End the publisher."""
        self._publisher.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _chosen(self, names: Collection[str] | None) -> list[str]:
        state = self.bits()
        return sorted(state if names is None else names)

    def _walk(self) -> Iterator[tuple[str, Any]]:
        import torch

        kinds = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
        signed = {2: "<i2", 4: "<i4"}
        for name, bits in self.bits().items():
            words = torch.from_numpy(bits.view(signed[bits.itemsize]).copy())
            yield name, words.view(kinds[self.dtypes[name]])
