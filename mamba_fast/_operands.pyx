# cython: language_level=3, freethreading_compatible=True
"""The quick part of what the CPU backend checks about an op's operands.

Design. A tiny op takes a few microseconds, and asking numpy for types, strides and overlaps of a dozen
operands takes longer than that. `clear` reads all of it from the array interface's C structure
(numpy's documented `__array_struct__`), once for each operand, sorts the operands by address and looks
only at those whose ranges of bytes meet. It answers True where everything is as it must be; where it
cannot tell, the slow checks of `backends/_cython_tensors.py` decide, and say what is wrong.
"""

from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.stdlib cimport free, qsort, realloc

from numpy import ndarray

cdef extern from *:
    """
    /* The structure behind __array_struct__, as numpy documents it. */
    typedef struct {
        int two, nd;
        char typekind;
        int itemsize, flags;
        Py_ssize_t *shape, *strides;
        void *data;
        PyObject *descr;
    } mf_array;
    """
    ctypedef struct mf_array:
        int nd
        char typekind
        int itemsize
        int flags
        Py_ssize_t *shape
        Py_ssize_t *strides
        void *data

cdef enum:
    # Bits of `flags`, as numpy documents them.
    CONTIGUOUS = 0x1
    ALIGNED = 0x100
    NATIVE = 0x200
    WRITABLE = 0x400

    READ = 0
    WRITTEN = 1


cdef struct Span:
    char *start
    char *stop
    Py_ssize_t distance     # between two rows in bytes, 0 where there are no gaps between them
    Py_ssize_t width        # of a row in bytes
    bint written


cdef struct Spans:
    Span *items
    Py_ssize_t n, room


cdef int by_start(const void *a, const void *b) noexcept nogil:
    cdef const Span *left = <const Span *> a
    cdef const Span *right = <const Span *> b
    return (left.start > right.start) - (left.start < right.start)


cdef bint rows_of(const mf_array *array, Span *span) noexcept nogil:
    """Describe a column view; False for an array that is none."""
    cdef Py_ssize_t distance = 0, expected = 0, rows = 1
    cdef int i = array.nd - 1
    if array.shape[i] > 1 and array.strides[i] != array.itemsize:
        return False
    span.width = array.shape[i] * array.itemsize
    i -= 1
    while i >= 0:
        if array.shape[i] > 1:
            if distance == 0:
                distance = array.strides[i]
                if distance < span.width:
                    return False
            elif array.strides[i] != expected:
                return False
            expected = array.strides[i] * array.shape[i]
            rows *= array.shape[i]
        i -= 1
    span.stop = span.start + (rows - 1) * distance + span.width
    span.distance = 0 if distance == span.width else distance
    return True


cdef bint add(Spans *spans, object tensor, char kind, bint written) except -1:
    """Append what memory a tensor covers; False where the tensor is not what it must be."""
    cdef const mf_array *array
    cdef Span *span
    cdef Py_ssize_t size, more
    cdef int i
    if tensor is None:
        return True
    if not isinstance(tensor, ndarray):
        return False
    capsule = tensor.__array_struct__       # holds the structure as long as it lives itself
    array = <const mf_array *> PyCapsule_GetPointer(capsule, NULL)
    if array.typekind != kind or array.itemsize != 4:
        return False
    if array.flags & (ALIGNED | NATIVE) != (ALIGNED | NATIVE) or (written and not array.flags & WRITABLE):
        return False
    if spans.n == spans.room:
        more = 2 * spans.room + 32
        span = <Span *> realloc(spans.items, more * sizeof(Span))
        if span == NULL:
            raise MemoryError("no memory to check the operands of an op")
        spans.items, spans.room = span, more
    span = spans.items + spans.n
    span.start, span.written = <char *> array.data, written
    if array.flags & CONTIGUOUS:
        size = array.itemsize
        for i in range(array.nd):
            size *= array.shape[i]
        span.stop, span.distance, span.width = span.start + size, 0, size
        spans.n += size != 0
        return True
    if not rows_of(array, span):
        return False
    spans.n += 1
    return True


cdef bint side_by_side(const Span *left, const Span *right) noexcept nogil:
    """Whether two column views of one buffer, of which `left` starts first, interleave without meeting."""
    cdef Py_ssize_t offset
    if left.distance == 0 or left.distance != right.distance:
        return False
    offset = (right.start - left.start) % left.distance
    return offset >= left.width and offset + right.width <= left.distance


cdef bint apart(Spans *spans) noexcept nogil:
    cdef Py_ssize_t i, j
    cdef const Span *left
    cdef const Span *right
    qsort(spans.items, spans.n, sizeof(Span), by_start)
    for i in range(spans.n):
        left = spans.items + i
        for j in range(i + 1, spans.n):
            right = spans.items + j
            if right.start >= left.stop:
                break
            if (left.written or right.written) and not side_by_side(left, right):
                return False
    return True


def clear(written, read, ids):
    """Whether every operand is a tensor of its type and nothing written overlaps another operand.

    Parameters
    ----------
    written, read
        iterables of float32 tensors or None
    ids
        an iterable of int32 tensors or None, which are only read

    False says only that a closer look is needed.
    """
    cdef Spans spans
    spans.items, spans.n, spans.room = NULL, 0, 0
    try:
        for tensor in written:
            if not add(&spans, tensor, c"f", WRITTEN):
                return False
        for tensor in read:
            if not add(&spans, tensor, c"f", READ):
                return False
        for tensor in ids:
            if not add(&spans, tensor, c"i", READ):
                return False
        return apart(&spans)
    finally:
        free(spans.items)
