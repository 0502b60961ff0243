"""Every error that stream_pack raises, one class for each reaction that a caller may have.

The classes are grouped by blame:

* :class:`SourceError` - the input cannot be packed as it is;
* :class:`OptionError` - an option of the call is invalid;
* :class:`StrictError` - there are warnings, and the caller wants none;
* :class:`LimitError` - a limit is exceeded, which is known before the first byte is written;
* :class:`FormatError` - the file is not a valid pack (found without recomputing checksums);
* :class:`ChecksumError` - bytes differ from those that were written;
* :class:`ReadError` - the system cannot read a part of the file;
* :class:`StateError` - a call in the wrong order;
* :class:`ModelMismatchError` - a model and a pack do not have the same tensors;
* :class:`MissingPackageError` - an optional package that is needed for this is not installed;
* :class:`UntestedVersionError` - an installed package differs from the versions tested;
* :class:`MetalError` - Metal refuses something, or would refuse it.

All derive from :class:`StreamPackError` and from the builtin that fits, and all can be pickled, as worker processes
need.  Numbers that a caller may act on are attributes as well as text.  ``OSError`` and errors raised by the caller's
own iterables pass unchanged.
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
    "MissingPackageError",
    "ModelMismatchError",
    "NewerVersionError",
    "NotAPackError",
    "OptionError",
    "RawPayloadError",
    "ReadError",
    "SafetensorError",
    "SourceChangedError",
    "SourceChecksumError",
    "SourceError",
    "StateError",
    "StreamPackError",
    "StrictError",
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
    """Base class of every error of this package; ``SafetensorError``, for scripts of safetensors, is the same class.

    Keyword arguments become attributes, which are pickled with the error.
    """

    def __init__(self, message: str, **attributes: object) -> None:
        super().__init__(message)
        self._attributes = attributes
        for name, value in attributes.items():
            setattr(self, name, value)

    def __str__(self) -> str:
        # KeyError, one of the builtins derived from below, would show the repr of its argument.
        return str(self.args[0])

    def extended(self, text: str) -> StreamPackError:
        """The same error with ``text`` at the end of its message."""
        return type(self)(f"{self}{text}", **self._attributes)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.args[0], self._attributes))


def _rebuild(cls: type[StreamPackError], message: str, attributes: dict[str, object]) -> StreamPackError:
    return cls(message, **attributes)


SafetensorError = StreamPackError
"""The name of safetensors' error, for scripts that catch it."""


class OptionError(StreamPackError, ValueError):
    """An invalid option: one of the wrong type, a pattern that does not parse, an unknown dtype."""


class SourceError(StreamPackError, ValueError):
    """The source cannot be packed as it is."""


class UnsupportedTensorError(SourceError):
    """A tensor that a pack cannot represent.  Attribute: ``tensor`` (its name)."""

    tensor: str


class UnsupportedCheckpointError(SourceError):
    """The input is not a checkpoint that this version reads, or it is ambiguous."""


class TruncatedSourceError(SourceError):
    """The source, or a part of it, is shorter than it says.

    Attributes, for a stream that ended: ``position`` (of its end), ``missing_nbytes``.
    """

    position: int
    missing_nbytes: int


class SourceChecksumError(SourceError):
    """The source's own checksum does not match its bytes: the source is damaged."""


class StrictError(StreamPackError, ValueError):
    """``strict`` was asked for, and the report would have warnings.  Attribute: ``warnings`` (a text each).

    Raised before the first byte is written.
    """

    warnings: tuple[str, ...]


class SourceChangedError(SourceError):
    """A file was written to while it was read: what was read may be neither its old state nor its new one."""


class LimitError(StreamPackError, ValueError):
    """A limit would be exceeded.  Attributes, if they apply: ``limit``, ``value``."""

    limit: int
    value: int


class FormatError(StreamPackError, ValueError):
    """The file is not a valid pack."""


class NotAPackError(FormatError):
    """Not a pack: the magic is wrong.  The message says what the file looks like instead."""


class RawPayloadError(FormatError):
    """A payload or .ptd that ExecuTorch wrote, without locator and footer: there are no checksums to verify."""


class NewerVersionError(FormatError):
    """The pack was written by a newer stream_pack.  Attributes: ``version``, ``supported``."""

    version: int
    supported: int


class TruncatedError(FormatError):
    """The file is shorter than its head says.  Attributes: ``expected_nbytes``, ``actual_nbytes``."""

    expected_nbytes: int
    actual_nbytes: int


class TrailingBytesError(FormatError):
    """The file is longer than its head says.  Attributes: ``expected_nbytes``, ``actual_nbytes``."""

    expected_nbytes: int
    actual_nbytes: int


class ChecksumError(StreamPackError, ValueError):
    """Bytes differ from those that were written.

    Attributes: ``part`` (``"head"``, ``"block"``, ``"checksums"``; ``"data"`` for data that ExecuTorch calls by their
    SHA-256), ``expected`` and ``actual`` (XXH3-64 values, or SHA-256 of data),
    ``file_begin`` and ``file_end`` (half-open byte range in the pack); for a block also ``tensor_count`` (how many
    tensors use it), ``tensors`` (their names; at most 100), ``buffer`` and ``block`` (its number in
    the buffer).
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


class ReadError(StreamPackError, OSError):
    """The system cannot read bytes of the pack: a bad sector, a network drive that is gone.

    Attributes: ``errno`` and ``strerror`` (the system's), ``filename``, ``file_begin`` and ``file_end`` (half-open byte
    range in the pack); for a block also those of :class:`ChecksumError`, but for ``expected`` and ``actual``.
    """

    part: str
    file_begin: int
    file_end: int
    tensors: tuple[str, ...]
    tensor_count: int
    buffer: int
    block: int


class StateError(StreamPackError, RuntimeError):
    """A call that is not allowed in this state, such as reading from a closed pack."""


class MappingInUse(StateError):
    """The mapping cannot be closed while views of it exist.  Attribute: ``tensors`` (their names)."""

    tensors: tuple[str, ...]


class UnknownTensorError(StreamPackError, KeyError):
    """There is no tensor with this name.  Attribute: ``tensor``."""

    tensor: str


class ModelMismatchError(StreamPackError, RuntimeError):
    """A model and a pack do not have the same tensors.

    Attributes: ``missing`` (names of the model that the pack lacks), ``unexpected`` (names of the pack that the model
    lacks).
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


class MissingPackageError(StreamPackError, ImportError):
    """A package that this needs is not installed.  Attribute: ``package`` (its name)."""

    package: str


class UntestedVersionError(StreamPackError, RuntimeError):
    """An installed package differs from the versions tested.  Attribute: ``faults`` (one text per difference)."""

    faults: tuple[str, ...]


class MetalError(StreamPackError, RuntimeError):
    """Base class of the errors of :mod:`stream_pack.metal`."""


class MetalUnavailable(MetalError):
    """There is no usable Metal device, or it cannot do this; the message says why."""


class MetalBufferError(MetalError):
    """An MTLBuffer that cannot be made: Metal refused it, or its range is invalid.

    Attributes, if they apply: ``address``, ``nbytes``.
    """

    address: int
    nbytes: int


class AlignmentError(MetalError):
    """Bytes are not aligned as they must be.  Attributes: ``value``, ``alignment`` (in bytes)."""

    value: int
    alignment: int


class TensorTooLarge(MetalError):
    """Tensors that are too large for a buffer of the device, or have a dim that a library cannot have.

    Attributes: ``tensors``, ``nbytes`` (of the largest), ``limit`` (in bytes, or of a dim).
    """

    tensors: tuple[str, ...]
    nbytes: int
    limit: int


class UnsupportedDtype(MetalError):
    """A dtype that the consumer does not support.  Attributes: ``tensor``, ``dtype``."""

    tensor: str
    dtype: str
