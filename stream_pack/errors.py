"""Every error that stream_pack raises, one class per reaction a caller may have.

The classes are grouped by blame:

* :class:`SourceError` - the input cannot be packed as it is;
* :class:`OptionError` - an option of the call means nothing;
* :class:`LimitError` - what was asked for exceeds a limit, known before the first byte;
* :class:`FormatError` - the file is not a valid pack (nothing was recomputed to find out);
* :class:`ChecksumError` - bytes differ from what was written;
* :class:`StateError` - calls in the wrong order;
* :class:`UntestedVersionError` - a package that is built upon is not one of the versions tested;
* :class:`MetalError` - Metal refused, or would have.

All derive from :class:`StreamPackError` and from the builtin that fits, and all survive pickling
(worker processes report them).  Numbers a caller may act on are attributes as well as text.
``OSError`` and errors raised by the caller's own iterables pass through unchanged.
"""

from __future__ import annotations

__all__ = [
    "AlignmentError",
    "ChecksumError",
    "FormatError",
    "LimitError",
    "MappingInUse",
    "MetalBufferError",
    "MetalError",
    "MetalUnavailable",
    "NewerVersionError",
    "NotAPackError",
    "OptionError",
    "RawPayloadError",
    "SourceChecksumError",
    "SourceError",
    "StateError",
    "StreamPackError",
    "TensorTooLarge",
    "TrailingBytesError",
    "TruncatedError",
    "TruncatedSourceError",
    "UnknownTensorError",
    "UnsupportedCheckpointError",
    "UnsupportedDtype",
    "UnsupportedTensorError",
    "UntestedVersionError",
]


class StreamPackError(Exception):
    """Base of every error of this package.

    Keyword arguments become attributes, and come along when the error is pickled.
    """

    def __init__(self, message: str, **attributes: object) -> None:
        super().__init__(message)
        self._attributes = attributes
        for name, value in attributes.items():
            setattr(self, name, value)

    def __str__(self) -> str:
        # KeyError, one of the builtins mixed in below, would show its argument's repr.
        return str(self.args[0])

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.args[0], self._attributes))


def _rebuild(
    cls: type[StreamPackError], message: str, attributes: dict[str, object]
) -> StreamPackError:
    return cls(message, **attributes)


class OptionError(StreamPackError, ValueError):
    """An option that has no meaning: a pattern that does not parse, an unknown dtype."""


class SourceError(StreamPackError, ValueError):
    """The source cannot be packed as it is."""


class UnsupportedTensorError(SourceError):
    """A tensor that has no faithful place in a pack.  Attribute: ``tensor`` (its name)."""

    tensor: str


class UnsupportedCheckpointError(SourceError):
    """The input is not a checkpoint this version reads, or holds what it must not guess about."""


class TruncatedSourceError(SourceError):
    """The source ended, or a part of it, before the bytes that it had announced.

    Attributes, for a stream that ended: ``position`` (of its end), ``missing_nbytes``.
    """

    position: int
    missing_nbytes: int


class SourceChecksumError(SourceError):
    """The source's own checksum disagrees with its bytes: it was damaged before it reached us."""


class LimitError(StreamPackError, ValueError):
    """A limit would be exceeded.  Attributes, where they apply: ``limit``, ``value``."""

    limit: int
    value: int


class FormatError(StreamPackError, ValueError):
    """The file is not a valid pack."""


class NotAPackError(FormatError):
    """No pack stands here: the magic is wrong.  The message says what it looks like instead."""


class RawPayloadError(FormatError):
    """ExecuTorch's own payload or .ptd, without locator and footer: nothing in it can be verified."""


class NewerVersionError(FormatError):
    """Made by a newer stream_pack.  Attributes: ``version``, ``supported``."""

    version: int
    supported: int


class TruncatedError(FormatError):
    """Shorter than its head says.  Attributes: ``expected_nbytes``, ``actual_nbytes``."""

    expected_nbytes: int
    actual_nbytes: int


class TrailingBytesError(FormatError):
    """Longer than its head says.  Attributes: ``expected_nbytes``, ``actual_nbytes``."""

    expected_nbytes: int
    actual_nbytes: int


class ChecksumError(StreamPackError, ValueError):
    """Bytes differ from what was written.

    Attributes: ``part`` (``"head"``, ``"block"``, ``"checksums"``), ``expected`` and ``actual``
    (the XXH3-64 values), ``file_begin`` and ``file_end`` (half-open byte range in the pack); for a
    block also ``tensor_count`` (how many tensors use it), ``tensors`` (their names; of an open pack
    100 at most), ``buffer`` and ``block`` (its number in the buffer).
    """

    part: str
    expected: int
    actual: int
    file_begin: int
    file_end: int
    tensors: tuple[str, ...]
    tensor_count: int
    buffer: int
    block: int


class StateError(StreamPackError, RuntimeError):
    """A call that is not valid now, such as reading from a closed pack."""


class MappingInUse(StateError):
    """The mapping cannot be closed while views of it live.  Attribute: ``tensors`` (their names)."""

    tensors: tuple[str, ...]


class UnknownTensorError(StreamPackError, KeyError):
    """No tensor of this name.  Attribute: ``tensor``."""

    tensor: str


class UntestedVersionError(StreamPackError, RuntimeError):
    """An installed package is not as in the versions tested.  Attribute: ``faults`` (what differs, one text each)."""

    faults: tuple[str, ...]


class MetalError(StreamPackError, RuntimeError):
    """Base of the errors of :mod:`stream_pack.metal`."""


class MetalUnavailable(MetalError):
    """No Metal device that could be used here, or not for this; the message says what is in the way."""


class MetalBufferError(MetalError):
    """An MTLBuffer that cannot be: Metal refused it, or its range is not one.

    Attributes, where they apply: ``address``, ``nbytes``.
    """

    address: int
    nbytes: int


class AlignmentError(MetalError):
    """Bytes do not stand where they would have to.  Attributes: ``value``, ``alignment`` (in bytes)."""

    value: int
    alignment: int


class TensorTooLarge(MetalError):
    """A tensor that no buffer of the device holds.  Attributes: ``tensors``, ``nbytes``, ``limit``.

    ``nbytes`` is that of the largest of them.
    """

    tensors: tuple[str, ...]
    nbytes: int
    limit: int


class UnsupportedDtype(MetalError):
    """A dtype that the consumer does not have.  Attributes: ``tensor``, ``dtype``."""

    tensor: str
    dtype: str
