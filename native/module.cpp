// Bindings only.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <optional>
#include <thread>

#include "cpu.h"
#include "exp_f64.h"
#include "fpenv.h"
#include "layout.h"
#include "matmul.h"
#include "program.h"
#include "ucrt_array.h"

namespace py = pybind11;

namespace kestrel {
namespace {

constexpr Isa kAllIsas[] = {Isa::scalar, Isa::avx2, Isa::avx512};

std::vector<std::string> isa_available() {
    std::vector<std::string> names;
    for (Isa isa : kAllIsas)
        if (isa_usable(isa)) names.emplace_back(isa_name(isa));
    return names;
}

Isa parse_isa(const std::string &name) {
    for (Isa isa : kAllIsas) {
        if (name != isa_name(isa)) continue;
        if (isa_usable(isa)) return isa;
        throw py::value_error("this CPU cannot run ISA level '" + name + "'");
    }
    throw py::value_error("no ISA level is called '" + name + "': scalar, avx2 or avx512");
}

// Runs without the GIL. Python ends a thread that wants it back while the interpreter ends, by pthread_exit, whose
// unwinding may not pass a destructor and would abort the process. Such a thread stays here until the process is gone.
class WithoutGil {
  public:
    WithoutGil() : state_(PyEval_SaveThread()) {}
    ~WithoutGil() {
        try {
            PyEval_RestoreThread(state_);
        } catch (...) {  // abi::__forced_unwind: it must be neither swallowed nor passed on
            for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
        }
    }
    WithoutGil(const WithoutGil &) = delete;
    WithoutGil &operator=(const WithoutGil &) = delete;

  private:
    PyThreadState *state_;
};

// A check of Python's signals for a caller that has released the GIL; empty where Python would not deliver any.
std::function<void()> signal_check() {
    const auto threading = py::module_::import("threading");
    if (!threading.attr("current_thread")().is(threading.attr("main_thread")())) return {};
    return [] {
        py::gil_scoped_acquire gil;
        if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    };
}

void run_program(Program &program, py::ssize_t begin, std::optional<py::ssize_t> end_or_none) {
    const auto size = static_cast<py::ssize_t>(program.size());
    const py::ssize_t end = end_or_none.value_or(size);
    if (begin < 0 || end > size || begin > end)
        throw py::index_error("ops " + std::to_string(begin) + " to " + std::to_string(end) + " of a program of " +
                              std::to_string(size));
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    const auto check = signal_check();
    const WithoutGil release;
    program.run(static_cast<size_t>(begin), static_cast<size_t>(end), check);
}

py::dict fpenv_state() {
    const unsigned mxcsr = _mm_getcsr();
    static const char *const roundings[] = {"nearest", "down", "up", "zero"};
    py::dict state;
    state["mxcsr"] = mxcsr;
    state["rounding"] = roundings[(mxcsr & kMxcsrRounding) >> 13];
    state["flush_to_zero"] = (mxcsr & kMxcsrFlushToZero) != 0;
    state["denormals_are_zero"] = (mxcsr & kMxcsrDenormalsAreZero) != 0;
    state["hostile_entries"] = hostile_fpenv_count.load();
    return state;
}

py::dict op_table() {
    py::dict table;
    for (const StructLayout &layout : struct_layouts()) {
        py::dict members, entry;
        for (const MemberLayout &m : layout.members) members[m.name] = py::make_tuple(m.offset, m.size);
        entry["size"] = layout.size;
        entry["members"] = members;
        table[layout.op] = entry;
    }
    return table;
}

// No forcecast: an array of another type is an error, not a silent conversion.
template <class T>
using Array = py::array_t<T, py::array::c_style>;

template <class T>
Array<T> map_array(const Array<T> &x, void (*function)(const T *, T *, size_t)) {
    Array<T> y(std::vector<py::ssize_t>(x.shape(), x.shape() + x.ndim()));
    const T *in = x.data();
    T *out = y.mutable_data();
    const auto n = static_cast<size_t>(x.size());
    const WithoutGil release;
    FpenvGuard guard;
    function(in, out, n);
    return y;
}

UcrtArrayFunction ucrt_function(const std::string &function, const std::string &form) {
    const UcrtForm *forms = nullptr;
    if (form == "scalar") forms = &ucrt_form_scalar;
    if (form == "scalar_fma" && isa_usable(Isa::avx2)) forms = &ucrt_form_scalar_fma;
    if (form == "joined") forms = &ucrt_form_joined;
    if (form == "joined_fma" && isa_usable(Isa::avx2)) forms = &ucrt_form_joined_fma;
    if (form == "avx2" && isa_usable(Isa::avx2)) forms = &ucrt_form_avx2;
    if (form == "avx512" && isa_usable(Isa::avx512)) forms = &ucrt_form_avx512;
    if (forms == nullptr) throw py::value_error("no form '" + form + "' of the UCRT functions on this CPU");
    if (function == "expf") return forms->expf;
    if (function == "cosf") return forms->cosf;
    if (function == "sinf") return forms->sinf;
    throw py::value_error("no UCRT function is called '" + function + "': expf, cosf or sinf");
}

py::dict ucrt_sweep_dict(const std::string &function, const std::string &a, const std::string &b, uint32_t step,
                         uint32_t b_below, int threads) {
    if (step < 1 || threads < 1 || threads > 1024) throw py::value_error("step and threads must be at least 1");
    const UcrtComparison comparison{ucrt_function(function, a), ucrt_function(function, b), function != "expf", step,
                                    b_below};
    UcrtSweep sweep;
    {
        const WithoutGil release;
        sweep = ucrt_sweep(comparison, threads);
    }
    py::dict result;
    result["inputs"] = sweep.inputs;
    result["different"] = sweep.different;
    result["first"] = sweep.first;
    result["nan_faults"] = sweep.nan_faults;
    result["order_faults"] = sweep.order_faults;
    return result;
}

}  // namespace
}  // namespace kestrel

PYBIND11_MODULE(_native, m) {
    using namespace kestrel;
    m.doc() = "The C++ reference of the numerics contract.";

    py::class_<Program>(m, "Program")
        .def(py::init([](const std::vector<std::pair<std::string, py::bytes>> &ops, int threads,
                         const std::string &isa) {
                 std::vector<std::pair<std::string, std::string>> list;
                 list.reserve(ops.size());
                 for (const auto &[name, bytes] : ops) list.emplace_back(name, bytes);
                 return std::make_unique<Program>(list, threads, parse_isa(isa));
             }),
             py::arg("ops"), py::arg("threads"), py::arg("isa"))
        .def("run", &run_program, py::arg("begin") = 0, py::arg("end") = py::none())
        .def("__len__", &Program::size)
        .def_property_readonly("threads", &Program::threads)
        .def_property_readonly("isa", [](const Program &p) { return isa_name(p.isa()); });

    m.def("isa_available", &isa_available);
    m.def(
        "use_vnni",
        [](std::optional<bool> enabled) {
            if (enabled && *enabled && !__builtin_cpu_supports("avx512vnni"))
                throw py::value_error("this CPU has no AVX-512 VNNI");
            if (enabled) use_vnni = *enabled;
            return use_vnni.load();
        },
        py::arg("enabled") = py::none());
    m.def("default_threads", &default_threads);
    m.def("fpenv_state", &fpenv_state);
    m.def("op_table", &op_table);
    m.def(
        "read_bandwidth",
        [](size_t nbytes, int threads) {
            if (threads < 1 || threads > 1024) throw py::value_error("threads must be 1 to 1024");
            const WithoutGil release;
            return read_bandwidth(nbytes, threads);
        },
        py::arg("nbytes"), py::arg("threads"));
    m.def(
        "exp_f64", [](const Array<double> &x) { return map_array<double>(x, exp_f64_array); },
        py::arg("x").noconvert());
    for (const char *function : {"expf", "cosf", "sinf"})
        m.def(
            (std::string(function) + "_ucrt").c_str(),
            [function](const Array<float> &x, const std::string &form) {
                return map_array<float>(x, ucrt_function(function, form));
            },
            py::arg("x").noconvert(), py::arg("form") = isa_available().back());
    m.def("ucrt_sweep", &ucrt_sweep_dict, py::arg("function"), py::arg("a"), py::arg("b"), py::arg("step") = 1,
          py::arg("b_below") = 0xffffffffu, py::arg("threads") = 1);
}
