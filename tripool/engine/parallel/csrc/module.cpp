// `tripool._native`: functions that take addresses as integers and let other threads run meanwhile. Python's stable
// interface only, and nothing of torch, so that one build serves every Python from 3.11 and every torch.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstring>

#include "../../ops/csrc/float.h"
#include "../../ops/csrc/glue.h"
#include "../../ops/csrc/int8.h"
#include "../../ops/csrc/mla.h"
#include "../../ops/csrc/step.h"
#include "../../ops/csrc/threads.h"
#include "exchange.h"

namespace {

constexpr int MAX_ARGS = 28;

// Reads exactly `count` integers, or sets an error.
bool integers(const char* name, PyObject* const* args, Py_ssize_t given, int count, int64_t* values) {
    if (given != count) {
        PyErr_Format(PyExc_TypeError, "%s takes %d integers, not %zd", name, count, given);
        return false;
    }
    for (int i = 0; i < count; i++) {
        values[i] = PyLong_AsLongLong(args[i]);
        if (values[i] == -1 && PyErr_Occurred()) return false;
    }
    return true;
}

using tripool::at;
using tripool::float_of;

#define FUNCTION(NAME, COUNT, CALL)                                                                                   \
    PyObject* py_##NAME(PyObject*, PyObject* const* args, Py_ssize_t given) {                                         \
        static_assert((COUNT) <= MAX_ARGS);                                                                           \
        int64_t v[MAX_ARGS];                                                                                          \
        if (!integers(#NAME, args, given, COUNT, v)) return nullptr;                                                  \
        int64_t status = 0;                                                                                           \
        Py_BEGIN_ALLOW_THREADS                                                                                        \
        status = (CALL);                                                                                              \
        Py_END_ALLOW_THREADS                                                                                          \
        return PyLong_FromLongLong(status);                                                                           \
    }

FUNCTION(set_level, 1, tripool::set_level(int(v[0])))
FUNCTION(num_words, 0, tripool::NUM_WORDS)
FUNCTION(quantise, 6, (tripool::quantise(at<void>(v[0]), v[1], v[2], v[3], at<int8_t>(v[4]), at<float>(v[5])), 0))
FUNCTION(send_dispatch, 11,
         tripool::send_dispatch(at<int64_t>(v[0]), uint64_t(v[1]), at<char>(v[2]), v[3], v[4], at<int64_t>(v[5]),
                                at<int32_t>(v[6]), at<int64_t>(v[7]), v[8], at<int32_t>(v[9]), at<int64_t>(v[10])))
FUNCTION(await_counts, 4, tripool::await_counts(at<int64_t>(v[0]), uint64_t(v[1]), v[2], at<int64_t>(v[3])))
FUNCTION(assemble, 9,
         tripool::assemble(at<int64_t>(v[0]), uint64_t(v[1]), v[2], at<int64_t>(v[3]), at<char>(v[4]),
                           at<float>(v[5]), at<int64_t>(v[6]), at<int64_t>(v[7]), at<int64_t>(v[8])))
FUNCTION(send_combine, 4,
         tripool::send_combine(at<int64_t>(v[0]), uint64_t(v[1]), at<char>(v[2]), at<int64_t>(v[3])))
FUNCTION(receive_combine, 9,
         tripool::receive_combine(at<int64_t>(v[0]), uint64_t(v[1]), v[2], at<char>(v[3]), at<int64_t>(v[4]),
                                  at<int32_t>(v[5]), at<int64_t>(v[6]), at<char>(v[7]), at<int64_t>(v[8])))
FUNCTION(join, 2, tripool::join(at<int64_t>(v[0]), v[1]))
FUNCTION(abort_epoch, 2, (tripool::abort_epoch(at<int64_t>(v[0]), v[1]), 0))

FUNCTION(num_threads, 0, tripool::num_threads())
FUNCTION(set_num_threads, 1, (tripool::set_num_threads(int(v[0])), 0))

// A packed weight: data, scales, sums, outputs, inputs.
tripool::Int8Weight weight(const int64_t* v) {
    return {at<int8_t>(v[0]), at<float>(v[1]), at<int32_t>(v[2]), v[3], v[4]};
}

FUNCTION(int8_level, 1, tripool::int8_level(int(v[0])))
FUNCTION(int8_linear, 12,
         (tripool::int8_linear(int(v[0]), at<char>(v[1]), v[2], at<float>(v[3]), v[4], weight(v + 5), at<char>(v[10]),
                               v[11]), 0))
FUNCTION(expert_ffn, 21,
         tripool::expert_ffn(int(v[0]), at<char>(v[1]), v[2], at<float>(v[3]), v[4], at<int64_t>(v[5]),
                             at<int64_t>(v[6]), v[7], v[8], weight(v + 9), weight(v + 14), at<char>(v[19]), v[20]))

FUNCTION(absorbed_attention, 21,
         tripool::absorbed_attention(int(v[0]), {at<char>(v[1]), v[2], v[3], v[4], v[5], v[6], at<char>(v[7]), v[8], v[9],
                                                 v[10], v[11], at<int64_t>(v[12]), v[13], at<int64_t>(v[14]),
                                                 at<int64_t>(v[15]), v[16], v[17], float_of(v[18]), v[19] != 0,
                                                 at<char>(v[20])}))
FUNCTION(expanded_attention, 25,
         (tripool::expanded_attention(int(v[0]), {at<char>(v[1]), at<char>(v[2]), at<char>(v[3]), at<char>(v[4]),
                                                  at<char>(v[5]), v[6], v[7], v[8], v[9], v[10], v[11], v[12], v[13], v[14],
                                                  v[15], v[16], v[17], v[18], v[19], v[20], v[21], float_of(v[22]),
                                                  v[23] != 0, at<char>(v[24])}), 0))
FUNCTION(multiply_numbers, 3, (tripool::multiply_numbers(int(v[0]), v[1] != 0, v[2]), 0))
FUNCTION(read_memory, 3, tripool::read_memory(int(v[0]), at<char>(v[1]), v[2]))

// A packed weight of floats: data, its format, outputs, inputs.
tripool::FloatWeight float_weight(const int64_t* v) { return {at<char>(v[0]), v[1], v[2], v[3]}; }

FUNCTION(float_linear, 12,
         (tripool::float_linear(int(v[0]), at<char>(v[1]), v[2], v[3],
                                {at<char>(v[4]), v[5], v[6], v[7], nullptr, at<float>(v[8])}, at<float>(v[9]),
                                at<char>(v[10]), v[11]), 0))
FUNCTION(head_product, 17,
         (tripool::head_product(int(v[0]), {at<char>(v[1]), v[2], v[3], v[4]}, v[5], v[6],
                                {at<char>(v[7]), v[8], v[9], v[10], at<float>(v[11]), at<float>(v[12])},
                                {at<char>(v[13]), v[14], v[15], v[16]}), 0))
FUNCTION(float_experts, 18,
         tripool::float_experts(int(v[0]), at<char>(v[1]), v[2], v[3], at<int64_t>(v[4]), at<int64_t>(v[5]), v[6], v[7],
                                float_weight(v + 8), float_weight(v + 12), at<char>(v[16]), v[17]))

FUNCTION(rms_norm, 13,
         (tripool::rms_norm(int(v[0]), v[1],
                            {at<void>(v[2]), v[3], v[4], v[5], at<void>(v[6]), at<void>(v[7]), at<void>(v[8]),
                             float_of(v[9]), at<void>(v[10]), at<int8_t>(v[11]), at<float>(v[12])}), 0))
FUNCTION(rotate, 13,
         (tripool::rotate(int(v[0]), v[1], at<void>(v[2]), v[3], v[4], v[5], v[6],
                          {at<float>(v[7]), v[8], v[9] != 0}, at<void>(v[10]), v[11], v[12]), 0))
FUNCTION(write_entries, 18,
         tripool::write_entries(int(v[0]), v[1], at<void>(v[2]), v[3], v[4], v[5], at<void>(v[6]), float_of(v[7]),
                                {at<float>(v[8]), v[9], v[10] != 0},
                                {at<void>(v[11]), v[12], v[13], v[14], v[15], at<int64_t>(v[16]), at<int64_t>(v[17])}))
FUNCTION(route, 14,
         (tripool::route(int(v[0]), {v[1], v[2], v[3] != 0, v[4], v[5], v[6], v[7] != 0, float_of(v[8])},
                         at<float>(v[9]), at<float>(v[10]), v[11], at<int64_t>(v[12]), at<float>(v[13])), 0))
FUNCTION(weighted_sum, 13,
         (tripool::weighted_sum(int(v[0]), v[1], {at<void>(v[2]), v[3], v[4], v[5], v[6], at<float>(v[7]),
                                                  at<void>(v[8]), v[9], at<void>(v[10]), v[11], at<void>(v[12])}), 0))
FUNCTION(sample, 7,
         (tripool::sample(int(v[0]), at<float>(v[1]), v[2], v[3], v[4], at<tripool::Draw>(v[5]), at<int64_t>(v[6])), 0))
FUNCTION(logprobs, 10,
         (tripool::logprobs(int(v[0]), at<float>(v[1]), v[2], v[3],
                            {at<int64_t>(v[4]), at<int64_t>(v[5]), v[6], v[7], at<float>(v[8]), at<int64_t>(v[9])}), 0))

FUNCTION(choose, 13,
         (tripool::choose(int(v[0]), *at<tripool::RowTable>(v[1]), at<float>(v[2]), v[3], v[4], at<int64_t>(v[5]),
                          at<int64_t>(v[6]), at<tripool::Draw>(v[7]), v[8], v[9], at<int64_t>(v[10]), at<int64_t>(v[11]),
                          at<bool>(v[12])), 0))

FUNCTION(attention_layer, 6,
         tripool::attention_layer(int(v[0]), *at<tripool::AttentionLayer>(v[1]), *at<tripool::AttentionStep>(v[2]),
                                  at<char>(v[3]), at<float>(v[4]), at<float>(v[5])))
FUNCTION(expert_layer, 6,
         (tripool::expert_layer(int(v[0]), *at<tripool::ExpertLayer>(v[1]), v[2], at<float>(v[3]), at<float>(v[4]),
                                at<int64_t>(v[5])), 0))
FUNCTION(forward, 6,
         tripool::forward(int(v[0]), *at<tripool::Model>(v[1]), *at<tripool::CacheBlocks>(v[2]),
                          *at<tripool::TokenRows>(v[3]), at<float>(v[4]), at<int64_t>(v[5])))
FUNCTION(draft, 7,
         tripool::draft(int(v[0]), *at<tripool::Model>(v[1]), *at<tripool::CacheBlocks>(v[2]),
                        *at<tripool::TokenRows>(v[3]), at<float>(v[4]), at<float>(v[5]), at<int64_t>(v[6])))

FUNCTION(guess, 9,
         tripool::guess(int(v[0]), *at<tripool::Model>(v[1]), *at<tripool::CacheBlocks>(v[2]),
                        *at<tripool::TokenRows>(v[3]), at<int64_t>(v[4]), v[5], at<tripool::Draw>(v[6]), at<int64_t>(v[7]),
                        at<int64_t>(v[8])))

FUNCTION(decode_step, 8,
         tripool::decode_step(int(v[0]), *at<tripool::Model>(v[1]), *at<tripool::CacheBlocks>(v[2]),
                              *at<tripool::SlotTable>(v[3]), v[4], v[5], *at<tripool::StepOutput>(v[6]),
                              *at<tripool::StepCounts>(v[7])))

#define METHOD(NAME) {#NAME, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(py_##NAME)), METH_FASTCALL, nullptr}

PyMethodDef METHODS[] = {
    METHOD(set_level), METHOD(num_words), METHOD(quantise), METHOD(send_dispatch), METHOD(await_counts),
    METHOD(assemble), METHOD(send_combine), METHOD(receive_combine), METHOD(join), METHOD(abort_epoch),
    METHOD(num_threads), METHOD(set_num_threads),
    METHOD(int8_level), METHOD(int8_linear), METHOD(expert_ffn), METHOD(read_memory), METHOD(float_linear),
    METHOD(float_experts),
    METHOD(rms_norm), METHOD(rotate), METHOD(write_entries), METHOD(head_product), METHOD(route), METHOD(weighted_sum),
    METHOD(sample), METHOD(logprobs), METHOD(choose),
    METHOD(absorbed_attention), METHOD(expanded_attention), METHOD(multiply_numbers),
    METHOD(attention_layer), METHOD(expert_layer), METHOD(forward), METHOD(draft), METHOD(guess), METHOD(decode_step),
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_native", "Native halves of Tripool's exchange and operations.", 0, METHODS,
                      nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__native() { return PyModule_Create(&MODULE); }
