"""A pickle machine that can only build inert values.

It reads pickles of protocol 1 to 5 as ``torch.save`` writes them.  It never imports, and never calls anything
that the file names: a name becomes whatever ``find_global`` returns for it, which is either a :class:`Callee` (a
function of *ours* that a REDUCE may call) or an :class:`Opaque` (a note that something of that name stood
there).  The values it builds are None, bool, int, float, str, bytes, tuple, list, dict, Opaque and what our
own Callees return.

Against hostile input: the pickle's length, every string, line and number, the stack, the nesting of marks and the
count of objects are bounded (the constants below); a length is never allocated before its bytes are there; no
key is hashed but text, bytes and small numbers (nested tuples overflow C's stack when hashed, and numbers can
be made to collide); nothing here or downstream recurses over what the file nests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from struct import Struct
from typing import NoReturn

from stream_pack.errors import TruncatedSourceError, UnsupportedCheckpointError
from stream_pack.pipeline.budget import UNLIMITED, MemoryWatch
from stream_pack.text import quoted

__all__ = ["STEP_NBYTES", "Callee", "OddKey", "Opaque", "Unpickler", "malformed"]

STEP_NBYTES = 8192
"""The pieces in which to read a pickle when memory is short: a byte of it becomes some 20 bytes of objects, and 130 at
worst (an EMPTY_SET), so that not much more than 1 MB is made before memory is looked at again."""

MAX_NBYTES = 256 << 20
"""The whole pickle: about 200 bytes a tensor, so a million tensors fit."""
MAX_OBJECTS = 16_000_000
"""Strings, containers and memo entries: about 17 a tensor, and together 1 to 3 GB at worst."""
MAX_STRING_NBYTES = 64 << 20
STRING_COPIES = 3
"""Lengths of a string that reading it takes: its pieces, these joined, and what becomes of it."""
GROWTH_NBYTES = 120
"""For each item of the longest dict: a dict that is full gets a new table beside the old one, and there may be two of
that length (the tensors, and their storages)."""
MAX_LINE_NBYTES = 4096
MAX_INTEGER_NBYTES = 1024
"""Python prints integers of up to 4,300 digits (about 1,785 bytes) without complaint."""
MAX_MARKS = 10_000
"""C's pickler stops at about 1,000 levels, with a few marks each."""
MAX_NESTED = 10_000
"""Values in values, however they came there."""
MAX_WAITING = 100_000
"""Containers on the stack that hold nothing yet: each may be inside the one before it.  A pickler has as many as it has
levels, and the empty ones of a tuple."""
FEW = 8
"""Items of a container that are all looked at in search of a chain."""
MAX_STACK = 1_000_000
"""Items between two marks; picklers flush lists and dicts every 1,000 items."""

_SMALL_KEY = 2**61 - 1
"""From here on Python's hashes of integers repeat, and could be chosen to."""

_U16, _I32, _U32, _U64, _F64 = (Struct(code) for code in ("<H", "<i", "<I", "<Q", ">d"))


class Callee:
    """A function of ours in place of what the file names ``name``; it must not trust its arguments' types."""

    __slots__ = ("call", "name")

    def __init__(self, name: str, call: Callable[..., object]) -> None:
        self.name = name
        self.call = call


class Opaque:
    """Something of the name ``name`` that stays closed; ``parts`` holds what the file would have put into it."""

    __slots__ = ("name", "parts")

    def __init__(self, name: str, parts: list[object] | None = None) -> None:
        self.name = name
        self.parts: list[object] = [] if parts is None else parts


class OddKey:
    """A dict key that is not hashed, so it equals no other."""

    __slots__ = ("key",)

    def __init__(self, key: object) -> None:
        self.key = key


def malformed(why: str) -> UnsupportedCheckpointError:
    """The error for a pickle that no torch has written."""
    return UnsupportedCheckpointError(f"the checkpoint's pickle is damaged or hostile: {why}")


def _holds_nothing(value: object) -> bool:
    return not (value.parts if type(value) is Opaque else value) if type(value) in _FILLED_LATER else False


_FILLED_LATER = (list, dict, Opaque)
_CONTAINERS = (list, tuple, dict, Opaque, OddKey)


def _nested_deeper(value: object, most: int) -> bool:
    """Whether a chain of values in values, down from ``value``, goes on for more than ``most`` levels.

    Of few items the last container is followed, of many the last item: whoever hides a chain has to write as much
    beside it.  What holds itself has no end, and is no chain.
    """
    met = value
    for depth in range(most + 1):
        if isinstance(value, list | tuple):
            inner: Sequence[object] = value
        elif type(value) is dict:
            inner = tuple(value.values()) if len(value) <= FEW else (value[next(reversed(value))],)
        elif type(value) is Opaque:
            inner = value.parts
        elif type(value) is OddKey:
            inner = (value.key,)
        else:
            return False
        if not inner:
            return False
        value = inner[-1]
        if len(inner) <= FEW:
            value = next((item for item in reversed(inner) if isinstance(item, _CONTAINERS)), None)
        if value is met:
            return False
        if depth & (depth - 1) == 0:
            met = value
    return True


class Unpickler:
    """One pickle, read from ``read_some`` (which gives some bytes at each call, none at the end) until its STOP.

    ``find_global(name)`` gives a Callee or an Opaque for "module.name"; ``find_persistent(id)`` gives the object for
    torch's persistent ids (storages).  ``watch`` is asked about the memory that the next piece will take beside the
    objects that become of it.

    After :meth:`load`, ``rest`` holds what was read beyond the pickle: always an end of the last piece.
    """

    def __init__(
        self,
        read_some: Callable[[], bytes],
        *,
        find_global: Callable[[str], object],
        find_persistent: Callable[[object], object],
        watch: MemoryWatch = UNLIMITED,
    ) -> None:
        self._read_some = read_some
        self._find_global = find_global
        self._find_persistent = find_persistent
        self._watch = watch
        self._data = b""
        self._at = 0
        self._passed = 0  # bytes before self._data
        self._stack: list[object] = []
        self._marks: list[list[object]] = []  # the stacks below each open mark
        # Pickles number their values from 0 up: a list needs no table that is copied when it grows.
        self._memo: list[object] = []
        self._odd_memo: dict[int, object] = {}  # what they stored under other numbers
        self._created = 0
        self._longest = 0  # of the dicts
        self._look_at = MAX_WAITING  # items on the stack at which its containers are counted

    @property
    def rest(self) -> bytes:
        """Bytes read beyond the pickle."""
        return self._data[self._at :]

    @property
    def nbytes(self) -> int:
        """Bytes of the pickle so far."""
        return self._passed + self._at

    def load(self) -> object:
        """The value that the pickle describes.

        Raises: UnsupportedCheckpointError, TruncatedSourceError; what ``read_some`` raises.
        """
        opcodes = _OPCODES
        try:
            while True:
                if self._at == len(self._data):
                    self._read(1)
                opcode = self._data[self._at]
                self._at += 1
                if opcode == STOP:
                    break
                opcodes[opcode](self)
            value = self._stack.pop()
        except IndexError:
            raise self._malformed("its stack underflows") from None
        if self._stack or self._marks:
            raise self._malformed("it ends with more than one value")
        return value

    # -- input

    def _read(self, nbytes: int) -> None:
        """Have ``nbytes`` bytes ahead, or raise; looks at the limits on the way, once in a piece."""
        self._check_stack()
        if self._created + self._memoized > MAX_OBJECTS:
            raise self._malformed(f"it holds more than {MAX_OBJECTS} objects")
        self._watch.allow(STRING_COPIES * nbytes + GROWTH_NBYTES * self._longest)
        pieces = [self._data[self._at :]]
        have = len(pieces[0])
        self._passed += self._at
        while have < nbytes:
            piece = self._read_some()
            if not piece:
                raise TruncatedSourceError(
                    f"the checkpoint's pickle ends at its byte {self._passed + have}, before its STOP"
                )
            pieces.append(piece)
            have += len(piece)
        if self._passed + nbytes > MAX_NBYTES:
            raise self._malformed(f"it is longer than {MAX_NBYTES} bytes")
        self._data, self._at = b"".join(pieces), 0

    def _check_stack(self) -> None:
        """Refuse values that are nested without end, which no step after this one should have to follow."""
        stack = self._stack
        if len(stack) > MAX_STACK:
            raise self._malformed(f"more than {MAX_STACK} values wait on its stack")
        if len(stack) <= MAX_WAITING:
            self._look_at = MAX_WAITING
        elif len(stack) > self._look_at:
            self._look_at = len(stack) + MAX_WAITING // 4  # so that all looks together take no longer than the stack
            if sum(map(_holds_nothing, stack[-3 * MAX_WAITING :])) > MAX_WAITING:  # keys may be between them
                raise self._malformed(f"more than {MAX_WAITING} containers wait on its stack")
        if _nested_deeper(stack[-FEW:], MAX_NESTED) or _nested_deeper(self._memo[-1:], MAX_NESTED):
            raise self._malformed(f"values nested more than {MAX_NESTED} deep")

    def _take(self, nbytes: int) -> bytes:
        begin = self._at
        if begin + nbytes > len(self._data):
            self._read(nbytes)
            begin = 0
        self._at = begin + nbytes
        return self._data[begin : self._at]

    def _take_string(self, nbytes: int) -> bytes:
        if nbytes > MAX_STRING_NBYTES:
            raise self._malformed(f"a string of {nbytes} bytes; the limit is {MAX_STRING_NBYTES}")
        self._created += 1
        return self._take(nbytes)

    def _byte(self) -> int:
        return self._take(1)[0]

    def _u32(self) -> int:
        at = self._at
        if at + 4 > len(self._data):
            self._read(4)
            at = 0
        self._at = at + 4
        number: int = _U32.unpack_from(self._data, at)[0]
        return number

    def _u64(self) -> int:
        return int(_U64.unpack(self._take(8))[0])

    def _line(self) -> str:
        searched = 0
        while (end := self._data.find(b"\n", self._at + searched)) < 0:
            searched = len(self._data) - self._at
            if searched > MAX_LINE_NBYTES:
                raise self._malformed(f"a line of more than {MAX_LINE_NBYTES} bytes")
            self._read(searched + 1)
        line = self._take(end - self._at)
        self._at += 1
        return self._text(line)

    def _text(self, data: bytes) -> str:
        try:
            # Lone surrogates are legal in pickles; the catalog refuses them where they matter, in names.
            return data.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            raise self._malformed("text that is not UTF-8") from None

    def _malformed(self, why: str) -> UnsupportedCheckpointError:
        return malformed(f"{why} (at byte {self.nbytes} of it)")

    # -- opcodes: numbers, text, bytes

    def _none(self) -> None:
        self._stack.append(None)

    def _true(self) -> None:
        self._stack.append(True)

    def _false(self) -> None:
        self._stack.append(False)

    def _binint(self) -> None:
        self._stack.append(_I32.unpack(self._take(4))[0])

    def _binint1(self) -> None:
        self._stack.append(self._take(1)[0])

    def _binint2(self) -> None:
        self._stack.append(_U16.unpack(self._take(2))[0])

    def _int_line(self) -> None:
        line = self._line()
        # "I01" and "I00" are how protocols 0 and 1 write True and False.
        self._stack.append({"01": True, "00": False}[line] if line in ("01", "00") else self._int(line))

    def _long_line(self) -> None:
        self._stack.append(self._int(self._line().removesuffix("L")))

    def _int(self, digits: str) -> int:
        if len(digits) > MAX_INTEGER_NBYTES or not digits.removeprefix("-").isdecimal():
            raise self._malformed(f"{quoted(digits, most=40)} where a number was expected")
        return int(digits)

    def _long1(self) -> None:
        self._integer(self._byte())

    def _long4(self) -> None:
        self._integer(self._u32())

    def _integer(self, nbytes: int) -> None:
        if nbytes > MAX_INTEGER_NBYTES:
            raise self._malformed(f"an integer of {nbytes} bytes; the limit is {MAX_INTEGER_NBYTES}")
        self._stack.append(int.from_bytes(self._take(nbytes), "little", signed=True))

    def _binfloat(self) -> None:
        self._stack.append(_F64.unpack(self._take(8))[0])

    def _binunicode(self) -> None:
        self._stack.append(self._text(self._take_string(self._u32())))

    def _short_binunicode(self) -> None:
        self._stack.append(self._text(self._take_string(self._byte())))

    def _binunicode8(self) -> None:
        self._stack.append(self._text(self._take_string(self._u64())))

    def _short_binstring(self) -> None:
        self._string(self._take_string(self._byte()))

    def _binstring(self) -> None:
        self._string(self._take_string(self._u32()))

    def _string(self, data: bytes) -> None:
        """A ``str`` of Python 2: text if it can be, else bytes."""
        try:
            self._stack.append(data.decode("utf-8"))
        except UnicodeDecodeError:
            self._stack.append(data)

    def _short_binbytes(self) -> None:
        self._stack.append(self._take_string(self._byte()))

    def _binbytes(self) -> None:
        self._stack.append(self._take_string(self._u32()))

    def _binbytes8(self) -> None:
        self._stack.append(self._take_string(self._u64()))

    # -- opcodes: stack and memo

    def _mark(self) -> None:
        if len(self._marks) >= MAX_MARKS:
            raise self._malformed(f"values nested more than {MAX_MARKS} deep")
        self._marks.append(self._stack)
        self._stack = []

    def _since_mark(self) -> list[object]:
        items, self._stack = self._stack, self._marks.pop()
        return items

    def _pop(self) -> None:
        self._stack.pop()

    def _pop_mark(self) -> None:
        self._since_mark()

    def _dup(self) -> None:
        self._stack.append(self._stack[-1])

    def _binput(self) -> None:
        self._put(self._take(1)[0])

    def _long_binput(self) -> None:
        self._put(self._u32())

    def _memoize(self) -> None:
        self._put(self._memoized)

    @property
    def _memoized(self) -> int:
        return len(self._memo) + len(self._odd_memo)

    def _put(self, index: int) -> None:
        value, memo = self._stack[-1], self._memo
        if index == len(memo):
            memo.append(value)
        elif index < len(memo):
            memo[index] = value
        else:
            self._odd_memo[index] = value

    def _binget(self) -> None:
        self._get(self._take(1)[0])

    def _long_binget(self) -> None:
        self._get(self._u32())

    def _get(self, index: int) -> None:
        if index < len(self._memo):
            self._stack.append(self._memo[index])
        elif index in self._odd_memo:
            self._stack.append(self._odd_memo[index])
        else:
            raise self._malformed(f"it reads memo entry {index} before it is set")

    # -- opcodes: containers

    def _empty_tuple(self) -> None:
        self._stack.append(())

    def _tuple1(self) -> None:
        self._created += 1
        self._stack[-1] = (self._stack[-1],)

    def _tuple2(self) -> None:
        self._created += 1
        last = self._stack.pop()
        self._stack[-1] = (self._stack[-1], last)

    def _tuple3(self) -> None:
        self._created += 1
        last = self._stack.pop()
        middle = self._stack.pop()
        self._stack[-1] = (self._stack[-1], middle, last)

    def _tuple(self) -> None:
        self._created += 1
        items = tuple(self._since_mark())
        self._stack.append(items)

    def _empty_list(self) -> None:
        self._created += 1
        self._stack.append([])

    def _list(self) -> None:
        self._created += 1
        items = self._since_mark()
        self._stack.append(items)

    def _empty_dict(self) -> None:
        self._created += 1
        self._stack.append({})

    def _dict(self) -> None:
        items = self._since_mark()
        self._empty_dict()
        self._set_all(items)

    def _empty_set(self) -> None:
        self._created += 1
        self._stack.append(Opaque("builtins.set"))

    def _frozenset(self) -> None:
        self._created += 1
        items = self._since_mark()
        self._stack.append(Opaque("builtins.frozenset", items))

    def _append(self) -> None:
        item = self._stack.pop()
        self._extend([item])

    def _appends(self) -> None:
        self._extend(self._since_mark())

    def _extend(self, items: list[object]) -> None:
        target = self._stack[-1]
        if type(target) is list:
            target.extend(items)
        elif type(target) is Opaque:
            target.parts.extend(items)
        else:
            raise self._malformed(f"it appends to a {type(target).__name__}")

    def _setitem(self) -> None:
        value = self._stack.pop()
        key = self._stack.pop()
        self._set_all([key, value])

    def _setitems(self) -> None:
        self._set_all(self._since_mark())

    def _set_all(self, items: list[object]) -> None:
        target = self._stack[-1]
        if len(items) % 2:
            raise self._malformed("a key without a value")
        if type(target) is dict:
            pairs = iter(items)
            for key in pairs:
                target[key if type(key) is str else self._key(key)] = next(pairs)
            self._longest = max(self._longest, len(target))
        elif type(target) is Opaque:
            target.parts.extend(items)
        else:
            raise self._malformed(f"it sets items of a {type(target).__name__}")

    def _key(self, key: object) -> object:
        if (isinstance(key, int) and abs(key) < _SMALL_KEY) or key is None or type(key) is bytes:
            return key
        if isinstance(key, list | dict):
            raise self._malformed(f"a {type(key).__name__} as a key")
        self._created += 1
        return OddKey(key)

    # -- opcodes: names and what is made of them

    def _global(self) -> None:
        module = self._line()
        self._push_global(module, self._line())

    def _stack_global(self) -> None:
        name = self._stack.pop()
        module = self._stack.pop()
        if type(name) is not str or type(module) is not str:
            raise self._malformed("a global whose name is not text")
        self._push_global(module, name)

    def _push_global(self, module: str, name: str) -> None:
        self._created += 1
        if len(module) + len(name) > MAX_LINE_NBYTES:
            raise self._malformed(f"the name of a global of more than {MAX_LINE_NBYTES} bytes")
        self._stack.append(self._find_global(f"{module}.{name}"))

    def _reduce(self) -> None:
        args = self._stack.pop()
        callee = self._stack.pop()
        if type(args) is not tuple:
            raise self._malformed("call arguments are not a tuple")
        if type(callee) is Callee:
            try:
                value = callee.call(*args)
            except TypeError:
                raise self._malformed(
                    f"{quoted(callee.name)} is called with {len(args)} arguments that it does not take"
                ) from None
        elif type(callee) is Opaque:
            value = Opaque(callee.name, [args])
        else:
            raise self._malformed(f"it calls a {type(callee).__name__}")
        self._created += 1
        self._stack.append(value)

    def _newobj_ex(self) -> None:
        keywords = self._stack.pop()
        args = self._stack.pop()
        callee = self._stack.pop()
        if type(callee) is not Opaque or type(args) is not tuple:
            raise self._malformed("it instantiates something that is not a class")
        self._created += 1
        self._stack.append(Opaque(callee.name, [args, keywords]))

    def _build(self) -> None:
        state = self._stack.pop()
        target = self._stack[-1]
        if type(target) is Opaque:
            target.parts.append(state)
        elif type(target) is not dict:  # an OrderedDict's attributes, such as _metadata, hold no items
            raise self._malformed(f"it sets the state of a {type(target).__name__}")

    def _binpersid(self) -> None:
        self._created += 1
        self._stack.append(self._find_persistent(self._stack.pop()))

    # -- opcodes: framing

    def _proto(self) -> None:
        protocol = self._byte()
        if protocol > 5:
            raise UnsupportedCheckpointError(
                f"the checkpoint's pickle has protocol {protocol}; this version reads 1 to 5: "
                "save it with pickle_protocol=2"
            )

    def _frame(self) -> None:
        self._take(8)

    def _refuse(self) -> NoReturn:
        opcode = self._data[self._at - 1]
        raise self._malformed(f"opcode 0x{opcode:02x}, which torch.save does not write")


STOP = ord(".")

_OPCODES: list[Callable[[Unpickler], None]] = [Unpickler._refuse] * 256
for _opcode, _method in {
    b"N": Unpickler._none,
    b"\x88": Unpickler._true,
    b"\x89": Unpickler._false,
    b"I": Unpickler._int_line,
    b"L": Unpickler._long_line,
    b"J": Unpickler._binint,
    b"K": Unpickler._binint1,
    b"M": Unpickler._binint2,
    b"\x8a": Unpickler._long1,
    b"\x8b": Unpickler._long4,
    b"G": Unpickler._binfloat,
    b"X": Unpickler._binunicode,
    b"\x8c": Unpickler._short_binunicode,
    b"\x8d": Unpickler._binunicode8,
    b"U": Unpickler._short_binstring,
    b"T": Unpickler._binstring,
    b"C": Unpickler._short_binbytes,
    b"B": Unpickler._binbytes,
    b"\x8e": Unpickler._binbytes8,
    b"\x96": Unpickler._binbytes8,  # BYTEARRAY8
    b"(": Unpickler._mark,
    b"0": Unpickler._pop,
    b"1": Unpickler._pop_mark,
    b"2": Unpickler._dup,
    b"q": Unpickler._binput,
    b"r": Unpickler._long_binput,
    b"\x94": Unpickler._memoize,
    b"h": Unpickler._binget,
    b"j": Unpickler._long_binget,
    b")": Unpickler._empty_tuple,
    b"\x85": Unpickler._tuple1,
    b"\x86": Unpickler._tuple2,
    b"\x87": Unpickler._tuple3,
    b"t": Unpickler._tuple,
    b"]": Unpickler._empty_list,
    b"l": Unpickler._list,
    b"}": Unpickler._empty_dict,
    b"d": Unpickler._dict,
    b"\x8f": Unpickler._empty_set,
    b"\x90": Unpickler._appends,  # ADDITEMS
    b"\x91": Unpickler._frozenset,
    b"a": Unpickler._append,
    b"e": Unpickler._appends,
    b"s": Unpickler._setitem,
    b"u": Unpickler._setitems,
    b"c": Unpickler._global,
    b"\x93": Unpickler._stack_global,
    b"R": Unpickler._reduce,
    b"\x81": Unpickler._reduce,  # NEWOBJ: a class and its arguments are the same to us
    b"\x92": Unpickler._newobj_ex,
    b"b": Unpickler._build,
    b"Q": Unpickler._binpersid,
    b"\x80": Unpickler._proto,
    b"\x95": Unpickler._frame,
}.items():
    _OPCODES[_opcode[0]] = _method
