// A library that takes DLPack capsules as MLX does on a Mac: by way of nanobind, keeping nothing but the ndarray.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <stdexcept>

namespace nb = nanobind;
using Taken = nb::ndarray<nb::ro>;

struct Array { Taken owner; };

NB_MODULE(consumer, module) {
    nb::class_<Array>(module, "Array")
        .def_prop_ro("data", [](const Array &array) { return (uintptr_t) array.owner.data_handle(); })
        .def_prop_ro("byte_offset", [](const Array &array) { return array.owner.byte_offset(); })
        .def_prop_ro("device", [](const Array &array) {
            return nb::make_tuple(array.owner.device_type(), array.owner.device_id());
        })
        .def_prop_ro("dtype", [](const Array &array) {
            auto dtype = array.owner.dtype();
            return nb::make_tuple(dtype.code, dtype.bits, dtype.lanes);
        })
        .def_prop_ro("shape", [](const Array &array) {
            nb::list shape;
            for (size_t axis = 0; axis < array.owner.ndim(); axis++) shape.append(array.owner.shape(axis));
            return shape;
        })
        .def_prop_ro("strides", [](const Array &array) {
            nb::list strides;
            for (size_t axis = 0; axis < array.owner.ndim(); axis++) strides.append(array.owner.stride(axis));
            return strides;
        })
        .def("reshape", [](Array &array, nb::tuple shape) { return nb::make_tuple(array, shape); });
    module.def("from_dlpack", [](Taken taken, nb::object) { return Array{std::move(taken)}; },
               nb::arg("x"), nb::kw_only(), nb::arg("copy") = nb::none());
    // As MLX without Metal: it has taken the capsule when it finds out that it cannot use it.
    module.def("refuse", [](Taken, nb::object) { throw std::invalid_argument("no Metal here"); },
               nb::arg("x"), nb::kw_only(), nb::arg("copy") = nb::none());
}
