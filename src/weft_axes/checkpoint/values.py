"""Plain values as JSON that reads back equal to what was written; anything else is refused.

{"seed": 1, "order": [3, 1]}     the same, as all plain JSON
{3: 1}                           {"<dict>": [[3, 1]]}
Counter({3: 1})                  {"<counter>": [[3, 1]]}
(1, 2)                           {"<tuple>": [1, 2]}
torch.tensor([0.5])              {"<tensor>": ["float32", [1], [0.5]]}
b"ab", io.BytesIO(b"ab")         {"<bytes>": "YWI="}, {"<bytesio>": "YWI="}
"""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .folder import DTYPES, CheckpointError

_DICT, _COUNTER, _TUPLE, _TENSOR = "<dict>", "<counter>", "<tuple>", "<tensor>"
_BYTES, _BYTESIO = "<bytes>", "<bytesio>"
TAGS = (_DICT, _COUNTER, _TUPLE, _TENSOR, _BYTES, _BYTESIO)
_PLAIN = (bool, int, float, str, type(None))


def encode(value: Any, where: str, tensors: bool = True) -> Any:
    """A value as JSON that `decode` makes an equal one of: mappings are dicts, tensors on the CPU.

    >>> encode({"milestones": {3: 1}, "betas": (0.9, 0.99)}, "notes")
    {'milestones': {'<dict>': [[3, 1]]}, 'betas': {'<tuple>': [0.9, 0.99]}}
    """
    try:
        return _encoded(value, where, tensors)
    except RecursionError:
        raise CheckpointError(
            f"{where} cannot be saved: nested too deeply, or contains itself"
        ) from None


def _encoded(value: Any, where: str, tensors: bool) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, list | tuple):
        items = [_encoded(v, f"{where}[{i}]", tensors) for i, v in enumerate(value)]
        return {_TUPLE: items} if isinstance(value, tuple) else items
    if isinstance(value, Mapping):
        return _mapping(value, where, tensors)
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode()}
    if isinstance(value, io.BytesIO):
        return {_BYTESIO: base64.b64encode(value.getvalue()).decode()}
    is_real = type(value) is Tensor and value.layout is torch.strided and not value.is_complex()
    if tensors and is_real:
        dtype = str(value.dtype).removeprefix("torch.")
        return {_TENSOR: [dtype, [*value.shape], value.detach().reshape(-1).tolist()]}
    raise CheckpointError(
        f"{where} is a {type(value).__name__}, which a JSON file cannot give back as it was; keep "
        "numbers, strings, None, bytes, lists, tuples and dicts"
        + (" and real tensors" if tensors else "")
    )


def _mapping(value: Mapping, where: str, tensors: bool) -> dict[str, Any]:
    keys = [_encoded(k, f"the key {k!r} of {where}", tensors=False) for k in value]
    items = [_encoded(v, f"{where}[{k!r}]", tensors) for k, v in value.items()]
    plain = all(isinstance(k, str) for k in keys) and not (len(keys) == 1 and keys[0] in TAGS)
    if isinstance(value, Counter) or not plain:
        tag = _COUNTER if isinstance(value, Counter) else _DICT
        return {tag: [list(pair) for pair in zip(keys, items)]}
    return dict(zip(keys, items))


def decode(value: Any, where: str = "a value") -> Any:
    """The value that `encode` made JSON of; raises `CheckpointError` if it did not make this.

    >>> decode(encode({3: (1, 2)}, "notes"))
    {3: (1, 2)}
    """
    try:
        return _decoded(value)
    except (ValueError, TypeError, KeyError, RecursionError, RuntimeError) as error:
        raise CheckpointError(f"{where} cannot be read: {' '.join(str(error).split())}") from None


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(v) for v in value]
    if not isinstance(value, dict):
        return value
    tag: str = next(iter(value)) if len(value) == 1 else ""
    content: Any = value.get(tag)
    if tag in (_DICT, _COUNTER):
        items = {_decoded(k): _decoded(v) for k, v in content}
        return Counter(items) if tag == _COUNTER else items
    if tag == _TUPLE:
        return tuple(_decoded(v) for v in content)
    if tag == _BYTES:
        return base64.b64decode(content)
    if tag == _BYTESIO:
        return io.BytesIO(base64.b64decode(content))
    if tag == _TENSOR:
        dtype, shape, numbers = content
        return torch.tensor(numbers, dtype=DTYPES[dtype]).reshape(shape)
    return {k: _decoded(v) for k, v in value.items()}
