/* The loops over shared memory, compiled: sums of what the ranks have shown, with nothing of Python's between pieces.

   They do what reduce.py and exchanges.py do, for sums and means of float32 and float64, and give the same bits: the
   ranks' parts are added in rank order, and a mean is divided once. board.py says how memory is laid out and ordered;
   its fence is a sequentially consistent one here. Who calls keeps all memory mapped, and holds the group's lock.

   Python's limited API: one binary serves every version from 3.10 on. */

#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include <linux/futex.h>
#include <limits.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { VERSION = 1, MOST_RANKS = 256, LAG = 1, NUM_SLOTS = 2 * LAG + 2, BOARD_BYTES = 4096 };
enum { COUNTER = 0, SLEEPING = 16, DOZING = 17, STATE = 32, CLOSED = 1 }; /* words of a board */
enum { CHUNK = 2048 };                                                   /* elements that stay in the first cache */
enum { LINES = 4, LINE_BYTES = 64 };

/* How long to look for a peer before Python takes over, which can sleep, see deaths and keep deadlines: some 30 us if
   nobody else wants the core, at once if the peer does. */
enum { LOOKS = 64, OFFERS = 8 };

/* Loops whose operands are the same array or don't overlap. */
#define EACH(i, count) _Pragma("GCC ivdep") for (size_t i = 0; i < (count); i++)

#define DEFINE_REDUCE(T)                                                                                        \
    static void add_##T(T *out, const T *a, const T *b, size_t count, T divisor)                                \
    {                                                                                                           \
        if (divisor == 1) {                                                                                     \
            EACH(i, count) out[i] = a[i] + b[i];                                                                \
        } else {                                                                                                \
            EACH(i, count) out[i] = (a[i] + b[i]) / divisor;                                                    \
        }                                                                                                       \
    }                                                                                                           \
    static void multiply_##T(T *out, const T *a, size_t count, T scale)                                         \
    {                                                                                                           \
        EACH(i, count) out[i] = a[i] * scale;                                                                   \
    }                                                                                                           \
    /* A sum of two, while `ahead` of as many elements is brought near. */                                         \
    static void add_ahead_##T(T *out, const T *a, const T *b, size_t count, T divisor, const char *ahead)       \
    {                                                                                                           \
        for (size_t start = 0; start < count; start += LINES * LINE_BYTES / sizeof(T)) {                        \
            size_t some = LINES * LINE_BYTES / sizeof(T);                                                       \
            for (int k = 0; k < LINES; k++) __builtin_prefetch(ahead + start * sizeof(T) + k * LINE_BYTES);     \
            if (some > count - start) some = count - start;                                                     \
            add_##T(out + start, a + start, b + start, some, divisor);                                          \
        }                                                                                                       \
    }                                                                                                           \
    /* Sum, or average, `parts` to `num_outs` places, which may be some of them. */                             \
    static void reduce_##T(char *const *outs, int num_outs, char *const *parts, int num, size_t count,          \
                           T divisor, const char *ahead)                                                        \
    {                                                                                                           \
        T sums[CHUNK];                                                                                          \
        if (num_outs == 1 && num == 2) {                                                                        \
            add_ahead_##T((T *)outs[0], (const T *)parts[0], (const T *)parts[1], count, divisor, ahead);       \
            return;                                                                                             \
        }                                                                                                       \
        for (size_t start = 0; start < count; start += CHUNK) {                                                 \
            size_t some = count - start < CHUNK ? count - start : CHUNK;                                        \
            memcpy(sums, (const T *)parts[0] + start, some * sizeof(T));                                        \
            for (int k = 1; k < num; k++)                                                                       \
                add_##T(sums, sums, (const T *)parts[k] + start, some, k == num - 1 ? divisor : 1);             \
            for (int k = 0; k < num_outs; k++) memcpy((T *)outs[k] + start, sums, some * sizeof(T));            \
        }                                                                                                       \
    }

DEFINE_REDUCE(float)
DEFINE_REDUCE(double)

static void reduce_bytes(char *const *outs, int num_outs, char *const *parts, int num, size_t count, int item_bytes,
                         int divisor, const char *ahead)
{
    if (item_bytes == 4)
        reduce_float(outs, num_outs, parts, num, count, (float)divisor, ahead);
    else
        reduce_double(outs, num_outs, parts, num, count, divisor, ahead);
}

static void look_away(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

/* An all-reduce that goes through the slots piece by piece, as far as it has come. */
typedef struct {
    char *boards[MOST_RANKS], *flat;
    int size, rank, item_bytes, divisor;
    size_t slot_bytes, piece, count;
    double scale;
    uint32_t first; /* the meeting at which the first piece is shown; each piece has the next one */
    Py_ssize_t shown, taken, pieces;
} Stream;

static uint32_t load(const char *board, int word)
{
    return __atomic_load_n((const uint32_t *)board + word, __ATOMIC_ACQUIRE);
}

static char *slot(const Stream *s, int rank, uint32_t meeting)
{
    return s->boards[rank] + BOARD_BYTES + (meeting % NUM_SLOTS) * s->slot_bytes;
}

static size_t length(const Stream *s, Py_ssize_t number)
{
    size_t left = s->count - (size_t)number * s->piece;
    return left < s->piece ? left : s->piece;
}

static char *piece_at(const Stream *s, Py_ssize_t number)
{
    return s->flat + (size_t)number * s->piece * (size_t)s->item_bytes;
}

static void copy_scaled(char *to, const char *from, size_t count, int item_bytes, double scale)
{
    if (item_bytes == 4)
        multiply_float((float *)to, (const float *)from, count, (float)scale);
    else
        multiply_double((double *)to, (const double *)from, count, scale);
}

static void show_next(Stream *s)
{
    uint32_t meeting = s->first + (uint32_t)s->shown;
    uint32_t *counter = (uint32_t *)s->boards[s->rank] + COUNTER;
    char *to = slot(s, s->rank, meeting), *from = piece_at(s, s->shown);
    if (s->scale == 1)
        memcpy(to, from, length(s, s->shown) * (size_t)s->item_bytes);
    else
        copy_scaled(to, from, length(s, s->shown), s->item_bytes, s->scale);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    __atomic_store_n(counter, meeting, __ATOMIC_RELEASE);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    for (int r = 0; r < s->size; r++)
        if (r != s->rank && (load(s->boards[r], SLEEPING) | load(s->boards[r], DOZING))) {
            syscall(SYS_futex, counter, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
            break;
        }
    s->shown++;
}

static void take_next(Stream *s)
{
    uint32_t meeting = s->first + (uint32_t)s->taken;
    char *own = piece_at(s, s->taken), *parts[MOST_RANKS];
    for (int r = 0; r < s->size; r++) parts[r] = slot(s, r, meeting);
    if (s->scale == 1) parts[s->rank] = own;
    /* The piece that is shown after this comes from far away: without this, 64 MiB take 12.6 ms instead of 9.9. */
    reduce_bytes(&own, 1, parts, s->size, length(s, s->taken), s->item_bytes, s->divisor, piece_at(s, s->shown));
    s->taken++;
}

/* Whether all have come to `meeting` and none has left with an error: those are Python's to look into. */
static int all_came(const Stream *s, uint32_t meeting)
{
    for (int r = 0; r < s->size; r++)
        if (r != s->rank &&
            ((int32_t)(load(s->boards[r], COUNTER) - meeting) < 0 || load(s->boards[r], STATE) > CLOSED))
            return 0;
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    return 1;
}

static int all_come_soon(const Stream *s, uint32_t meeting)
{
    for (int offer = 0;; offer++) {
        for (int look = 0; look < LOOKS; look++) {
            if (all_came(s, meeting)) return 1;
            look_away();
        }
        if (offer == OFFERS) return 0;
        sched_yield();
    }
}

/* Goes on until a peer keeps it waiting, or all is done. The caller has seen all come to the meeting of the first piece
   that is shown and not taken. */
static void go_on(Stream *s)
{
    int seen = s->shown > s->taken;
    if (!s->shown) { /* the second meeting comes after the first, where ranks see whether they ask for the same */
        show_next(s);
        return;
    }
    while (s->taken < s->pieces) {
        if (s->shown < s->pieces && s->shown - s->taken <= LAG) {
            show_next(s);
            continue;
        }
        if (!seen && !all_come_soon(s, s->first + (uint32_t)s->taken)) return;
        seen = 0;
        take_next(s);
    }
}

static int read_addresses(PyObject *tuple, char **out)
{
    Py_ssize_t size = PyTuple_Size(tuple);
    if (size < 1 || size > MOST_RANKS) {
        PyErr_SetString(PyExc_ValueError, "expected the addresses of 1 to 256 ranks");
        return -1;
    }
    for (Py_ssize_t i = 0; i < size; i++) {
        out[i] = PyLong_AsVoidPtr(PyTuple_GetItem(tuple, i));
        if (out[i] == NULL) return -1;
    }
    return (int)size;
}

static PyObject *stream(PyObject *module, PyObject *args)
{
    Stream s;
    PyObject *boards;
    unsigned long long flat;
    Py_ssize_t count, piece, slot_bytes;
    unsigned long first;
    if (!PyArg_ParseTuple(args, "O!inKnidinknn", &PyTuple_Type, &boards, &s.rank, &slot_bytes, &flat, &count,
                          &s.item_bytes, &s.scale, &s.divisor, &piece, &first, &s.shown, &s.taken))
        return NULL;
    s.size = read_addresses(boards, s.boards);
    if (s.size < 0) return NULL;
    if (piece < 1 || piece * s.item_bytes > slot_bytes || (s.item_bytes != 4 && s.item_bytes != 8)) {
        PyErr_SetString(PyExc_ValueError, "expected pieces of elements of 4 or 8 bytes that fit into a slot");
        return NULL;
    }
    s.flat = (char *)(uintptr_t)flat;
    s.count = (size_t)count, s.piece = (size_t)piece, s.slot_bytes = (size_t)slot_bytes;
    s.first = (uint32_t)first, s.pieces = (count + piece - 1) / piece;
    Py_BEGIN_ALLOW_THREADS
    go_on(&s);
    Py_END_ALLOW_THREADS
    return Py_BuildValue("nn", s.shown, s.taken);
}

static PyObject *reduce_all(PyObject *module, PyObject *args)
{
    PyObject *places;
    char *parts[MOST_RANKS];
    Py_ssize_t count;
    int item_bytes, divisor, size;
    if (!PyArg_ParseTuple(args, "O!nii", &PyTuple_Type, &places, &count, &item_bytes, &divisor)) return NULL;
    size = read_addresses(places, parts);
    if (size < 0) return NULL;
    Py_BEGIN_ALLOW_THREADS
    reduce_bytes(parts, size, parts, size, (size_t)count, item_bytes, divisor, parts[0]);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *gather(PyObject *module, PyObject *args)
{
    PyObject *outs, *ins, *counts;
    int item_bytes;
    double scale;
    if (!PyArg_ParseTuple(args, "O!O!O!id", &PyTuple_Type, &outs, &PyList_Type, &ins, &PyTuple_Type, &counts,
                          &item_bytes, &scale))
        return NULL;
    Py_ssize_t size = PyTuple_Size(outs);
    if (PyList_Size(ins) != size || PyTuple_Size(counts) != size) {
        PyErr_SetString(PyExc_ValueError, "expected as many places and lengths to copy to as to copy from");
        return NULL;
    }
    for (Py_ssize_t i = 0; i < size; i++) {
        char *to = PyLong_AsVoidPtr(PyTuple_GetItem(outs, i)), *from = PyLong_AsVoidPtr(PyList_GetItem(ins, i));
        Py_ssize_t count = PyLong_AsSsize_t(PyTuple_GetItem(counts, i));
        if (PyErr_Occurred()) return NULL;
        copy_scaled(to, from, (size_t)count, item_bytes, scale);
    }
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"stream", stream, METH_VARARGS,
     "stream(boards, rank, slot_bytes, address, count, item_bytes, scale, divisor, piece, first, shown, taken) -> "
     "(shown, taken)\n\nShow and take pieces until a peer keeps it waiting, or all is done."},
    {"reduce_all", reduce_all, METH_VARARGS,
     "reduce_all(addresses, count, item_bytes, divisor)\n\nSum what lies at the addresses, and write it to all."},
    {"gather", gather, METH_VARARGS,
     "gather(outs, ins, counts, item_bytes, scale)\n\nCopy to addresses what lies at others, times `scale`."},
    {NULL, NULL, 0, NULL},
};

static int fill(PyObject *module)
{
    PyObject *layout =
        Py_BuildValue("iiiiiiii", COUNTER, SLEEPING, DOZING, STATE, CLOSED, BOARD_BYTES, NUM_SLOTS, MOST_RANKS);
    if (layout == NULL || PyModule_AddObjectRef(module, "LAYOUT", layout) < 0) return -1;
    Py_DECREF(layout);
    return PyModule_AddIntConstant(module, "VERSION", VERSION);
}

static PyModuleDef_Slot parts_of_module[] = {{Py_mod_exec, fill}, {0, NULL}};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_kernels", "Loops over shared memory.", 0, methods, parts_of_module, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__kernels(void)
{
    return PyModuleDef_Init(&definition);
}
