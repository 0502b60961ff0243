"""As much of Vulkan, through ctypes, as it takes to let a compute shader read imported host memory.

Source: the Vulkan specification, vulkan_core.h; structures are written in its order, numbers are its enums.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_char_p, c_float, c_int32, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

__all__ = ["Gpu", "find_loader"]

HOST_ALLOCATION = 0x80  # VK_EXTERNAL_MEMORY_HANDLE_TYPE_HOST_ALLOCATION_BIT_EXT
MISSING = {-7: "VK_ERROR_EXTENSION_NOT_PRESENT", -9: "VK_ERROR_INCOMPATIBLE_DRIVER"}
EXTENSION = b"VK_EXT_external_memory_host"
STORAGE_BUFFER = 0x20  # VK_BUFFER_USAGE_STORAGE_BUFFER_BIT
STORAGE_DESCRIPTOR = 7  # VK_DESCRIPTOR_TYPE_STORAGE_BUFFER
COMPUTE = 0x20  # VK_SHADER_STAGE_COMPUTE_BIT
HOST_COHERENT = 2 | 4  # VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT | HOST_COHERENT_BIT


class Link(ctypes.Structure):
    """How every extensible structure begins."""

    _fields_ = (("sType", c_uint32), ("pNext", c_void_p))


def structure(kind: int | None, /, **fields: Any) -> Any:
    """A structure of these fields, ``name=(type, value)``; ``kind`` is its VkStructureType."""
    base = ctypes.Structure if kind is None else Link
    layout = tuple((name, kind_) for name, (kind_, _) in fields.items() if name != "pNext")
    made = type("Structure", (base,), {"_fields_": layout})()
    if kind is not None:
        made.sType = kind
    made.keep = []
    for name, (_, value) in fields.items():
        if isinstance(value, ctypes.Structure | ctypes.Array):
            made.keep.append(value)
            value = ctypes.addressof(value)
        setattr(made, name, value)
    return made


def array(kind: Any, values: Sequence[Any]) -> Any:
    return (kind * len(values))(*values)


def find_loader() -> ctypes.CDLL | None:
    """The Vulkan loader, if it is installed."""
    try:
        return ctypes.CDLL("libvulkan.so.1")
    except OSError:
        return None


class Gpu:
    """A device, a queue, and the shader.  Nothing is freed before :meth:`close`."""

    def __init__(self, loader: ctypes.CDLL, *, driver: str) -> None:
        self.vk = loader
        self.dropped: list[tuple[str, int]] = []
        application = structure(
            0,
            name=(c_char_p, b"test"), version=(c_uint32, 0), engine=(c_char_p, None), engine_version=(c_uint32, 0),
            api=(c_uint32, 1 << 22 | 1 << 12),
        )  # fmt: skip
        info = structure(
            1,
            flags=(c_uint32, 0), application=(c_void_p, application),
            layers=(c_uint32, 0), layer_names=(c_void_p, None),
            extensions=(c_uint32, 0), extension_names=(c_void_p, None),
        )  # fmt: skip
        self.instance = self.make("vkCreateInstance", info)
        self.physical = self._physical(driver)
        names = array(c_char_p, [EXTENSION])
        queue_info = structure(
            2,
            flags=(c_uint32, 0), family=(c_uint32, 0), count=(c_uint32, 1),
            priorities=(c_void_p, array(c_float, [1.0])),
        )  # fmt: skip
        info = structure(
            3,
            flags=(c_uint32, 0), queues=(c_uint32, 1), queue_infos=(c_void_p, queue_info), layers=(c_uint32, 0),
            layer_names=(c_void_p, None), extensions=(c_uint32, 1), extension_names=(c_void_p, names),
            features=(c_void_p, None),
        )  # fmt: skip
        self.device = self.make("vkCreateDevice", info, first=self.physical)
        queue = c_void_p()
        loader.vkGetDeviceQueue(self.device, c_uint32(0), c_uint32(0), ctypes.byref(queue))
        self.queue = queue

    def _physical(self, driver: str) -> c_void_p:
        count = c_uint32(0)
        self.check("vkEnumeratePhysicalDevices", self.instance, ctypes.byref(count), None)
        found = (c_void_p * count.value)()
        self.check("vkEnumeratePhysicalDevices", self.instance, ctypes.byref(count), found)
        for handle in found:
            properties = ctypes.create_string_buffer(2048)  # VkPhysicalDeviceProperties; the name at byte 20
            self.vk.vkGetPhysicalDeviceProperties(c_void_p(handle), properties)
            if driver in properties.raw[20:276].partition(b"\0")[0].decode():
                return c_void_p(handle)
        raise LookupError(f"no Vulkan device of {driver} among {count.value}")

    def check(self, name: str, *arguments: Any) -> None:
        result = getattr(self.vk, name)(*arguments)
        if result in MISSING:
            raise LookupError(f"{name}: {MISSING[result]}")
        assert result == 0, f"{name}: VkResult {result}"

    def make(self, name: str, info: Any, *, first: Any = None) -> c_void_p:
        """``vkCreate...(first, info, NULL, &made)``."""
        made = c_void_p()
        leading = () if first is None else (first,)
        self.check(name, *leading, ctypes.byref(info), None, ctypes.byref(made))
        return made

    def create(self, what: str, info: Any) -> c_void_p:
        made = self.make(f"vkCreate{what}", info, first=self.device)
        self.dropped.append((f"vkDestroy{what}", made.value or 0))
        return made

    def buffer(self, nbytes: int, *, imported: int | None) -> tuple[c_void_p, c_void_p]:
        """A storage buffer and its memory: new, or the host memory at address ``imported``."""
        external = structure(1000072000, handle_types=(c_uint32, HOST_ALLOCATION))
        buffer = self.create(
            "Buffer",
            structure(
                12,
                pNext=(c_void_p, external if imported else None),
                flags=(c_uint32, 0), size=(c_uint64, nbytes), usage=(c_uint32, STORAGE_BUFFER), sharing=(c_uint32, 0),
                families=(c_uint32, 0), family_indices=(c_void_p, None),
            ),
        )  # fmt: skip
        requirements = structure(None, size=(c_uint64, 0), alignment=(c_uint64, 0), types=(c_uint32, 0))
        self.vk.vkGetBufferMemoryRequirements(self.device, buffer, ctypes.byref(requirements))
        types = requirements.types
        pointer_info = None
        if imported:
            pointer_info = structure(1000178000, handle_type=(c_uint32, HOST_ALLOCATION), pointer=(c_void_p, imported))
            types &= self._types_of(imported)
        memory = self.make(
            "vkAllocateMemory",
            structure(
                5,
                pNext=(c_void_p, pointer_info),
                size=(c_uint64, nbytes), type_index=(c_uint32, self._memory_type(types)),
            ),
            first=self.device,
        )  # fmt: skip
        self.dropped.append(("vkFreeMemory", memory.value or 0))
        self.check("vkBindBufferMemory", self.device, buffer, memory, c_uint64(0))
        return buffer, memory

    def _types_of(self, address: int) -> int:
        self.vk.vkGetDeviceProcAddr.restype = c_void_p
        function = self.vk.vkGetDeviceProcAddr(self.device, b"vkGetMemoryHostPointerPropertiesEXT")
        call = ctypes.CFUNCTYPE(c_int32, c_void_p, c_uint32, c_void_p, c_void_p)(function)
        properties = structure(1000178001, types=(c_uint32, 0))
        result = call(self.device, HOST_ALLOCATION, address, ctypes.addressof(properties))
        assert result == 0, f"vkGetMemoryHostPointerPropertiesEXT: VkResult {result}"
        return int(properties.types)

    def _memory_type(self, allowed: int) -> int:
        properties = (c_uint32 * 130)()  # VkPhysicalDeviceMemoryProperties: a count, then pairs of flags and heap
        self.vk.vkGetPhysicalDeviceMemoryProperties(self.physical, properties)
        for index in range(properties[0]):
            if allowed & 1 << index and properties[1 + 2 * index] & HOST_COHERENT == HOST_COHERENT:
                return index
        raise LookupError("no memory type that the host sees")

    def run(self, shader: Path, buffers: Sequence[c_void_p], constants: Sequence[int], groups: int) -> None:
        """Dispatch the shader over storage buffers, and wait."""
        code = shader.read_bytes()
        words = (c_uint32 * (len(code) // 4)).from_buffer_copy(code)
        module = self.create(
            "ShaderModule", structure(15, flags=(c_uint32, 0), size=(c_size_t, len(code)), code=(c_void_p, words))
        )
        bindings = b"".join(
            bytes(structure(
                None,
                binding=(c_uint32, number), kind=(c_uint32, STORAGE_DESCRIPTOR), count=(c_uint32, 1),
                stages=(c_uint32, COMPUTE), samplers=(c_void_p, None),
            ))
            for number in range(len(buffers))
        )  # fmt: skip
        set_layout = self.create(
            "DescriptorSetLayout",
            structure(
                32,
                flags=(c_uint32, 0), count=(c_uint32, len(buffers)),
                bindings=(c_void_p, ctypes.create_string_buffer(bindings, len(bindings))),
            ),
        )  # fmt: skip
        set_layouts = array(c_void_p, [set_layout.value])
        pushed = array(c_uint32, [COMPUTE, 0, 4 * len(constants)])
        layout = self.create(
            "PipelineLayout",
            structure(
                30,
                flags=(c_uint32, 0), sets=(c_uint32, 1), set_layouts=(c_void_p, set_layouts), ranges=(c_uint32, 1),
                push_ranges=(c_void_p, pushed),
            ),
        )  # fmt: skip
        pipeline = self._pipeline(module, layout)
        descriptors = self._descriptors(set_layouts, buffers)
        commands = self._commands()
        begin = structure(42, flags=(c_uint32, 1), inheritance=(c_void_p, None))
        self.check("vkBeginCommandBuffer", commands, ctypes.byref(begin))
        self.vk.vkCmdBindPipeline(commands, c_uint32(1), pipeline)
        self.vk.vkCmdBindDescriptorSets(
            commands, c_uint32(1), layout, c_uint32(0), c_uint32(1), ctypes.byref(descriptors), c_uint32(0), None
        )  # fmt: skip
        values = array(c_uint32, constants)
        self.vk.vkCmdPushConstants(
            commands, layout, c_uint32(COMPUTE), c_uint32(0), c_uint32(4 * len(constants)), values
        )
        self.vk.vkCmdDispatch(commands, c_uint32(groups), c_uint32(1), c_uint32(1))
        self.check("vkEndCommandBuffer", commands)
        submit = structure(
            4,
            waits=(c_uint32, 0), wait_semaphores=(c_void_p, None), stages=(c_void_p, None), count=(c_uint32, 1),
            buffers=(c_void_p, array(c_void_p, [commands.value])), signals=(c_uint32, 0), semaphores=(c_void_p, None),
        )  # fmt: skip
        self.check("vkQueueSubmit", self.queue, c_uint32(1), ctypes.byref(submit), None)
        self.check("vkQueueWaitIdle", self.queue)

    def _pipeline(self, module: c_void_p, layout: c_void_p) -> c_void_p:
        # VkPipelineShaderStageCreateInfo stands inside, at a multiple of 8.
        info = structure(
            29,
            flags_and_padding=(c_uint64, 0), stage_type=(c_uint32, 18), stage_next=(c_void_p, None),
            stage_flags=(c_uint32, 0), stage=(c_uint32, COMPUTE), module=(c_void_p, module.value),
            entry=(c_char_p, b"main"), specialization=(c_void_p, None),
            layout=(c_void_p, layout.value), base=(c_void_p, None), base_index=(c_int32, -1),
        )  # fmt: skip
        made = c_void_p()
        self.check(
            "vkCreateComputePipelines", self.device, None, c_uint32(1), ctypes.byref(info), None, ctypes.byref(made)
        )  # fmt: skip
        self.dropped.append(("vkDestroyPipeline", made.value or 0))
        return made

    def _descriptors(self, set_layouts: Any, buffers: Sequence[c_void_p]) -> c_void_p:
        room = array(c_uint32, [STORAGE_DESCRIPTOR, len(buffers)])
        pool = self.create(
            "DescriptorPool",
            structure(
                33,
                flags=(c_uint32, 0), sets=(c_uint32, 1), sizes=(c_uint32, 1), pool_sizes=(c_void_p, room),
            ),
        )  # fmt: skip
        info = structure(34, pool=(c_void_p, pool.value), count=(c_uint32, 1), layouts=(c_void_p, set_layouts))
        descriptors = c_void_p()
        self.check("vkAllocateDescriptorSets", self.device, ctypes.byref(info), ctypes.byref(descriptors))
        for binding, buffer in enumerate(buffers):
            whole = structure(None, buffer=(c_void_p, buffer.value), offset=(c_uint64, 0), size=(c_uint64, 2**64 - 1))
            write = structure(
                35,
                target=(c_void_p, descriptors.value), binding=(c_uint32, binding), element=(c_uint32, 0),
                count=(c_uint32, 1), kind=(c_uint32, STORAGE_DESCRIPTOR), images=(c_void_p, None),
                buffers=(c_void_p, whole), texels=(c_void_p, None),
            )  # fmt: skip
            self.vk.vkUpdateDescriptorSets(self.device, c_uint32(1), ctypes.byref(write), c_uint32(0), None)
        return descriptors

    def _commands(self) -> c_void_p:
        pool = self.create("CommandPool", structure(39, flags=(c_uint32, 0), family=(c_uint32, 0)))
        info = structure(40, pool=(c_void_p, pool.value), level=(c_uint32, 0), count=(c_uint32, 1))
        commands = c_void_p()
        self.check("vkAllocateCommandBuffers", self.device, ctypes.byref(info), ctypes.byref(commands))
        return commands

    def read(self, memory: c_void_p, nbytes: int) -> bytes:
        """What stands in host-visible memory."""
        address = c_void_p()
        self.check(
            "vkMapMemory", self.device, memory, c_uint64(0), c_uint64(nbytes), c_uint32(0), ctypes.byref(address)
        )  # fmt: skip
        data = ctypes.string_at(address.value or 0, nbytes)
        self.vk.vkUnmapMemory(self.device, memory)
        return data

    def close(self) -> None:
        for name, handle in reversed(self.dropped):
            getattr(self.vk, name)(self.device, c_void_p(handle), None)
        self.vk.vkDestroyDevice(self.device, None)
        self.vk.vkDestroyInstance(self.instance, None)
