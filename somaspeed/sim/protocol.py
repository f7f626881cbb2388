"""What the training side and a simulator process say to each other: msgpack messages behind a length, over pipes.

Every request gets exactly one reply. A process greets with `Ready`, and ends when its input does.
"""

from __future__ import annotations

import struct
from typing import IO, Any, Literal, get_args

import msgspec
import numpy as np

LENGTH = struct.Struct("<Q")
Rendering = Literal["full", "fast"]  # see rendering.py
RENDERINGS: tuple[Rendering, ...] = get_args(Rendering)
LARGEST = 4 << 30  # bytes of one message; more means that the stream is not ours


class ProtocolError(RuntimeError):
    """The stream ended inside a message, or holds something else than messages."""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Base of all messages; the class's name is the tag on the wire."""


class Begin(Message, frozen=True):
    """Reset `task` to its stored initial state `init` and let it settle. Replied to with Observation."""

    task: int
    init: int
    seed: int
    max_steps: int
    film_every: int = 0  # frames of the first camera kept for a video, in control steps; 0: none
    blind: bool = False  # observations without images, which take most of the time


class Act(Message, frozen=True):
    """Take `actions`, float [n, 7], until the episode ends. Replied to with Observation or Finished."""

    actions: np.ndarray


class Collect(Message, frozen=True):
    """Let the oracle solve `task` from initial state `init`. Replied to with Episode."""

    task: int
    init: int
    seed: int
    noise: float


class Render(Message, frozen=True):
    """Render simulator states [n, S] of an episode of `task` that was begun with `seed`. Replied to with Frames."""

    task: int
    seed: int
    states: np.ndarray


class Task(msgspec.Struct, frozen=True):
    """One task of a suite: its instruction, and how many initial states are stored."""

    language: str
    inits: int


class Ready(Message, frozen=True):
    """The greeting: what this process simulates, with which versions, and how it renders."""

    suite: str
    tasks: list[Task]
    versions: dict[str, str]
    rendering: Rendering = "full"


class Observation(Message, frozen=True):
    """What the robot sees: uint8 images [H, W, 3] as in training data, float32 state [8], steps taken so far."""

    images: dict[str, np.ndarray]
    state: np.ndarray
    steps: int
    film: np.ndarray | None = None  # uint8 [n, H, W, 3] since the last reply


class Finished(Message, frozen=True):
    """The episode is over after `steps` control steps."""

    success: bool
    steps: int
    film: np.ndarray | None = None


class Episode(Message, frozen=True):
    """What the oracle did, T steps: simulator states [T, S], `state` float32 [T, 8], `action` float32 [T, 7].

    `attempts` counts the grasp sides that were tried; `phase` is where the last one ended.
    """

    success: bool
    attempts: int
    phase: str
    states: np.ndarray
    state: np.ndarray
    action: np.ndarray


class Frames(Message, frozen=True):
    """PNG files per camera, one per state."""

    images: dict[str, list[bytes]]


class Failed(Message, frozen=True):
    """The request raised; `trace` says where. The process lives on."""

    trace: str


Request = Begin | Act | Collect | Render
Reply = Ready | Observation | Finished | Episode | Frames | Failed


def send(stream: IO[bytes], message: Message) -> None:
    """Write one message and flush it."""
    payload = encode(message)
    stream.write(LENGTH.pack(len(payload)))
    stream.write(payload)
    stream.flush()


def receive_request(stream: IO[bytes]) -> Request | None:
    """The next request, or None where the stream ends. Raises ProtocolError."""
    payload = _receive(stream)
    return None if payload is None else _decode(_requests, payload)


def receive_reply(stream: IO[bytes]) -> Reply | None:
    """The next reply, or None where the stream ends. Raises ProtocolError."""
    payload = _receive(stream)
    return None if payload is None else decode_reply(payload)


def encode(message: Message) -> bytes:
    """One message without its length, as files keep it."""
    return _encoder.encode(message)


def decode_reply(payload: bytes) -> Reply:
    """The reverse of `encode` for replies. Raises ProtocolError."""
    return _decode(_replies, payload)


def _receive(stream: IO[bytes]) -> bytes | None:
    header = stream.read(LENGTH.size)
    if not header:
        return None
    if len(header) < LENGTH.size:
        raise ProtocolError("the stream ended inside a message")
    (length,) = LENGTH.unpack(header)
    if length > LARGEST:
        raise ProtocolError(f"a message of {length} bytes: something else than messages was written to the stream")
    payload = stream.read(length)
    if len(payload) < length:
        raise ProtocolError("the stream ended inside a message")
    return payload


def _decode(decoder: msgspec.msgpack.Decoder, payload: bytes) -> Any:
    try:
        return decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"not a message: {error}") from None


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, np.ascontiguousarray(value).tobytes()
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value).__name__} cannot be sent")


def _array(kind: type, value: Any) -> Any:
    if kind is not np.ndarray:
        raise NotImplementedError(f"{kind.__name__} cannot be received")
    dtype, shape, data = value
    return np.frombuffer(data, np.dtype(dtype)).reshape(shape)


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_requests = msgspec.msgpack.Decoder(Request, dec_hook=_array)
_replies = msgspec.msgpack.Decoder(Reply, dec_hook=_array)
