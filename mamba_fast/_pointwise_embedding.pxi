# Rows of a table, and the sum of gradients back into it; included by _pointwise.pyx.

cdef struct Embedding:
    Rows table, y
    const int *ids
    const Py_ssize_t *order
    Py_ssize_t n, cols


cdef void gather_task(void *ctx, Py_ssize_t task, int worker) noexcept nogil:
    cdef const Embedding *job = <const Embedding *> ctx
    cdef Py_ssize_t each = rows_of_task(job.cols), r
    for r in range(task * each, min(job.n, (task + 1) * each)):
        memcpy(row(&job.y, r), row(&job.table, job.ids[r]), job.cols * sizeof(float))


def gather(const int[::1] ids, const float[:, :] table, float[:, :] y, int threads):
    """y[r] = table[ids[r]]. The caller has checked the ids."""
    cdef Embedding job
    readable(&job.table, table, "table")
    writable(&job.y, y, "y")
    job.ids, job.n, job.cols = &ids[0], ids.shape[0], table.shape[1]
    with nogil:
        parallel_for(gather_task, &job, tasks_of(job.n, rows_of_task(job.cols)), threads)


cdef inline void widen_run(double *acc, mf_in x, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(n):
        acc[i] += <double> x[i]


cdef void scatter_task(void *ctx, Py_ssize_t task, int worker) noexcept nogil:
    cdef const Embedding *job = <const Embedding *> ctx
    cdef Py_ssize_t c = task * SCATTER_TILE, n = min(job.cols - c, <Py_ssize_t> SCATTER_TILE), i = 0, j
    cdef double acc[SCATTER_TILE]
    cdef float *out
    cdef int id
    while i < job.n:
        id = job.ids[job.order[i]]
        memset(acc, 0, sizeof(acc))
        while i < job.n and job.ids[job.order[i]] == id:
            widen_run(acc, row(&job.y, job.order[i]) + c, n)
            i += 1
        out = row(&job.table, id) + c
        for j in range(n):
            out[j] += <float> acc[j]


def scatter_add(
    const int[::1] ids, const Py_ssize_t[::1] order, const float[:, :] dy, float[:, :] d_table, int threads
):
    """d_table[ids[r]] += dy[r] for every row. `order` is a stable sort of the ids: the rows of one id are
    summed in float64 in the order in which they occur."""
    cdef Embedding job
    readable(&job.y, dy, "dy")
    writable(&job.table, d_table, "d_table")
    job.ids, job.order, job.n, job.cols = &ids[0], &order[0], ids.shape[0], d_table.shape[1]
    with nogil:
        parallel_for(scatter_task, &job, tasks_of(job.cols, SCATTER_TILE), threads)
