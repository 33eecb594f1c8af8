# cython: language_level=3, freethreading_compatible=True
"""Causal depthwise convolution with SiLU: forward, backward and one step.

    pre[b, t, e] = bias[e] + sum_k w[e, k] * x[b, t - k, e],      y = silu(pre) or pre

Design. Channels are the contiguous axis, so every inner loop runs over a tile of up to TILE channels
and vectorises as it stands; a row of x is read once from memory and K times from the cache. A task is
(batch row, tile) forward and (group of batch rows, tile) backward. The weights come transposed to
(K, E), so that one tap is contiguous over channels.

Nothing but x is kept for the backward pass: recomputing `pre` costs K multiply-adds an element and
saves an array of the size of x. It walks t downwards in one pass. The gradients of `pre` live in a
ring of K rows: position t needs those of t .. t+K-1 for dx. The gradients of the weights are
accumulated over FLUSH steps in float32, then in float64, one partial sum for each task; the partial
sums are added in the order of the batch groups. No result depends on the number of threads.

`seq_start`, `lengths` and the initial state only limit which taps count. With `start` the last
restart at or before t (or K-1 steps before the sequence, where the initial state lies), tap k counts
where k <= t - start. Position p < 0 is entry K-1+p of the initial state.
"""

from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

from mamba_fast._kernel cimport add_run, flush_run, mf_in, mf_out, mf_sigmoid, mf_silu, tasks_of
from mamba_fast._threads cimport parallel_for

cdef enum:
    TILE = 128      # channels of a task
    FLUSH = 64      # steps between two additions of float32 sums to the float64 ones
    GROUPS = 16     # most groups of batch rows backward: bounds the memory of the partial sums


cdef struct Conv:
    Py_ssize_t B, L, E, K
    bint silu
    # Inputs; *_b and *_t are the distances of two batch rows and of two steps in elements.
    const float *x
    Py_ssize_t x_b, x_t
    const float *w              # (K, E) contiguous
    const float *bias           # or NULL
    const float *init           # (B, K-1, E) or NULL
    Py_ssize_t init_b, init_t
    const int *seq_start        # or NULL
    Py_ssize_t seq_b
    const int *lengths          # or NULL
    # Forward: outputs. Step: `final` is the state, updated in place.
    float *y
    Py_ssize_t y_b, y_t
    float *final
    Py_ssize_t final_b, final_t
    # Backward.
    Py_ssize_t groups
    const float *dy
    Py_ssize_t dy_b, dy_t
    const float *d_final        # or NULL
    Py_ssize_t d_final_b, d_final_t
    float *dx
    Py_ssize_t dx_b, dx_t
    float *d_init               # or NULL
    Py_ssize_t d_init_b, d_init_t
    double *partial             # (groups, K + 1, E): sums for dw by tap, then for dbias; or NULL
    float *scratch              # for each worker: ring (K, TILE), then sums (K + 1, TILE)


cdef inline void tap(mf_out acc, mf_in w, mf_in x, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(n):
        acc[i] += w[i] * x[i]


cdef inline void tap4(
    mf_out acc, mf_in w, Py_ssize_t w_stride, mf_in x0, mf_in x1, mf_in x2, mf_in x3, Py_ssize_t n
) noexcept nogil:
    """Four taps at once: the sum stays in a register between them."""
    cdef Py_ssize_t i
    cdef mf_in w1 = w + w_stride
    cdef mf_in w2 = w1 + w_stride
    cdef mf_in w3 = w2 + w_stride
    for i in range(n):
        acc[i] = acc[i] + w[i] * x0[i] + w1[i] * x1[i] + w2[i] * x2[i] + w3[i] * x3[i]


cdef inline void silu_run(mf_out y, mf_in pre, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(n):
        y[i] = mf_silu(pre[i])


cdef inline void silu_backward_run(mf_out dpre, mf_in pre, mf_in dy, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t i
    cdef float s
    for i in range(n):
        s = mf_sigmoid(pre[i])
        dpre[i] = dy[i] * (s * (1.0 + pre[i] * (1.0 - s)))


cdef inline Py_ssize_t length_of(const Conv *job, Py_ssize_t b) noexcept nogil:
    return job.L if job.lengths == NULL else <Py_ssize_t> job.lengths[b]


cdef inline bint restarts(const Conv *job, Py_ssize_t b, Py_ssize_t t) noexcept nogil:
    return job.seq_start != NULL and job.seq_start[b * job.seq_b + t] != 0


cdef inline Py_ssize_t first_start(const Conv *job) noexcept nogil:
    """Where the inputs begin as long as nothing has restarted."""
    return 0 if job.init == NULL else -(job.K - 1)


cdef inline Py_ssize_t start_at(const Conv *job, Py_ssize_t b, Py_ssize_t t) noexcept nogil:
    """The first position that taps at t may reach."""
    while t >= 0:
        if restarts(job, b, t):
            return t
        t -= 1
    return first_start(job)


cdef inline bint restarts_before(const Conv *job, Py_ssize_t b, Py_ssize_t stop) noexcept nogil:
    cdef Py_ssize_t t
    for t in range(stop):
        if restarts(job, b, t):
            return True
    return False


cdef inline const float *input_at(const Conv *job, Py_ssize_t b, Py_ssize_t p, Py_ssize_t c) noexcept nogil:
    """The inputs at position p >= -(K-1), from channel c on."""
    if p >= 0:
        return job.x + b * job.x_b + p * job.x_t + c
    return job.init + b * job.init_b + (job.K - 1 + p) * job.init_t + c


cdef inline void convolve(
    const Conv *job, Py_ssize_t b, Py_ssize_t t, Py_ssize_t start, Py_ssize_t c, Py_ssize_t n, float *acc
) noexcept nogil:
    """acc = pre[b, t, c : c+n]"""
    cdef Py_ssize_t k = 0, taps = min(job.K, t - start + 1)
    if job.bias != NULL:
        memcpy(acc, job.bias + c, n * sizeof(float))
    else:
        memset(acc, 0, n * sizeof(float))
    while k + 4 <= taps:
        tap4(
            acc, job.w + k * job.E + c, job.E, input_at(job, b, t - k, c), input_at(job, b, t - k - 1, c),
            input_at(job, b, t - k - 2, c), input_at(job, b, t - k - 3, c), n,
        )
        k += 4
    while k < taps:
        tap(acc, job.w + k * job.E + c, input_at(job, b, t - k, c), n)
        k += 1


cdef void forward_task(void *ctx, Py_ssize_t task, int worker) noexcept nogil:
    cdef const Conv *job = <const Conv *> ctx
    cdef Py_ssize_t tiles = tasks_of(job.E, TILE)
    cdef Py_ssize_t b = task // tiles, c = (task % tiles) * TILE, n = min(job.E - c, <Py_ssize_t> TILE)
    cdef Py_ssize_t length = length_of(job, b), start = first_start(job), t, j, p
    cdef float *y = job.y + b * job.y_b + c
    cdef float *final = job.final + b * job.final_b + c
    cdef float acc[TILE]
    for t in range(length):
        if restarts(job, b, t):
            start = t
        convolve(job, b, t, start, c, n, acc)
        if job.silu:
            silu_run(y + t * job.y_t, acc, n)
        else:
            memcpy(y + t * job.y_t, acc, n * sizeof(float))
    for t in range(length, job.L):
        memset(y + t * job.y_t, 0, n * sizeof(float))
    for j in range(job.K - 1):
        p = length - (job.K - 1) + j
        if p >= start:
            memcpy(final + j * job.final_t, input_at(job, b, p, c), n * sizeof(float))
        else:
            memset(final + j * job.final_t, 0, n * sizeof(float))


cdef void backward_row(
    const Conv *job, Py_ssize_t b, Py_ssize_t c, Py_ssize_t n, float *ring, float *sums, double *total
) noexcept nogil:
    """One row of the batch: dx and d_init of a tile, and its share of dw and dbias."""
    cdef Py_ssize_t K = job.K, length = length_of(job, b)
    cdef Py_ssize_t start = start_at(job, b, length - 1)
    cdef Py_ssize_t last_start = start      # the final state reaches no further back
    cdef bint unbroken = not restarts_before(job, b, length)
    cdef Py_ssize_t stop = length           # a tap from here on does not see position t
    cdef Py_ssize_t t, k, p, j, unflushed = 0
    cdef float *dx = job.dx + b * job.dx_b + c
    cdef const float *dy = job.dy + b * job.dy_b + c
    cdef const float *d_final
    cdef float *dpre
    cdef float *out
    cdef float acc[TILE]
    for t in range(length, job.L):
        memset(dx + t * job.dx_t, 0, n * sizeof(float))
    t = length - 1
    while t >= 0:
        if t < start:
            stop = start
            start = start_at(job, b, t)
        dpre = ring + (t % K) * TILE
        if job.silu:
            convolve(job, b, t, start, c, n, acc)
            silu_backward_run(dpre, acc, dy + t * job.dy_t, n)
        else:
            memcpy(dpre, dy + t * job.dy_t, n * sizeof(float))
        if total != NULL:
            for k in range(min(K, t - start + 1)):
                tap(sums + k * TILE, dpre, input_at(job, b, t - k, c), n)
            add_run(sums + K * TILE, dpre, n)
            unflushed += 1
            if unflushed == FLUSH or t == 0:
                for k in range(K + 1):
                    flush_run(total + k * job.E + c, sums + k * TILE, n)
                unflushed = 0
        out = dx + t * job.dx_t
        p = t - (length - (K - 1))          # the entry of the final state that holds x[t]
        if job.d_final != NULL and p >= 0 and t >= last_start:
            d_final = job.d_final + b * job.d_final_b + p * job.d_final_t + c
            memcpy(out, d_final, n * sizeof(float))
        else:
            memset(out, 0, n * sizeof(float))
        for k in range(min(K, stop - t)):
            tap(out, job.w + k * job.E + c, ring + ((t + k) % K) * TILE, n)
        t -= 1
    if job.d_init == NULL:
        return
    if restarts(job, b, 0):
        stop = 0
    for j in range(K - 1):
        out = job.d_init + b * job.d_init_b + j * job.d_init_t + c
        p = j - (K - 1)
        if job.d_final != NULL and j >= length and unbroken:
            d_final = job.d_final + b * job.d_final_b + (j - length) * job.d_final_t + c
            memcpy(out, d_final, n * sizeof(float))
        else:
            memset(out, 0, n * sizeof(float))
        for k in range(-p, min(K, stop - p)):
            tap(out, job.w + k * job.E + c, ring + ((p + k) % K) * TILE, n)


cdef void backward_task(void *ctx, Py_ssize_t task, int worker) noexcept nogil:
    cdef const Conv *job = <const Conv *> ctx
    cdef Py_ssize_t tiles = tasks_of(job.E, TILE)
    cdef Py_ssize_t group = task // tiles, c = (task % tiles) * TILE, n = min(job.E - c, <Py_ssize_t> TILE)
    cdef Py_ssize_t b
    cdef float *ring = job.scratch + worker * (2 * job.K + 1) * TILE
    cdef float *sums = ring + job.K * TILE
    cdef double *total = NULL
    if job.partial != NULL:
        total = job.partial + group * (job.K + 1) * job.E
        memset(sums, 0, (job.K + 1) * TILE * sizeof(float))
    for b in range(group * job.B // job.groups, (group + 1) * job.B // job.groups):
        backward_row(job, b, c, n, ring, sums, total)


cdef void step_task(void *ctx, Py_ssize_t task, int worker) noexcept nogil:
    cdef const Conv *job = <const Conv *> ctx
    cdef Py_ssize_t tiles = tasks_of(job.E, TILE)
    cdef Py_ssize_t b = task // tiles, c = (task % tiles) * TILE, n = min(job.E - c, <Py_ssize_t> TILE)
    cdef Py_ssize_t j
    cdef float *state = job.final + b * job.final_b + c
    cdef float acc[TILE]
    convolve(job, b, 0, first_start(job), c, n, acc)
    if job.silu:
        silu_run(job.y + b * job.y_b + c, acc, n)
    else:
        memcpy(job.y + b * job.y_b + c, acc, n * sizeof(float))
    for j in range(job.K - 2):
        memcpy(state + j * job.final_t, state + (j + 1) * job.final_t, n * sizeof(float))
    if job.K > 1:
        memcpy(state + (job.K - 2) * job.final_t, job.x + b * job.x_b + c, n * sizeof(float))


cdef int unit(const float[:, :, :] a, str name) except -1:
    """The channels of an argument are contiguous."""
    if a.shape[2] > 1 and a.strides[2] != sizeof(float):
        raise ValueError(f"{name}: the last axis must be contiguous, its stride is {a.strides[2]} bytes")
    return 0


cdef inline Py_ssize_t by(Py_ssize_t stride_in_bytes) noexcept nogil:
    return stride_in_bytes // <Py_ssize_t> sizeof(float)


cdef int set_inputs(
    Conv *job, const float[:, :, :] x, const float[:, ::1] wt, const float[::1] bias,
    const float[:, :, :] initial_state, const int[:, :] seq_start, const int[::1] lengths, bint silu,
) except -1:
    memset(job, 0, sizeof(Conv))
    job.B, job.L, job.E, job.K = x.shape[0], x.shape[1], x.shape[2], wt.shape[0]
    job.silu = silu
    unit(x, "x")
    job.x, job.x_b, job.x_t = &x[0, 0, 0], by(x.strides[0]), by(x.strides[1])
    job.w = &wt[0, 0]
    if bias is not None:
        job.bias = &bias[0]
    if initial_state is not None and job.K > 1:
        unit(initial_state, "initial_state")
        job.init = &initial_state[0, 0, 0]
        job.init_b, job.init_t = by(initial_state.strides[0]), by(initial_state.strides[1])
    if seq_start is not None:
        if seq_start.shape[1] > 1 and seq_start.strides[1] != sizeof(int):
            raise ValueError(
                f"seq_start: the last axis must be contiguous, its stride is {seq_start.strides[1]} bytes"
            )
        job.seq_start, job.seq_b = &seq_start[0, 0], by(seq_start.strides[0])
    if lengths is not None:
        job.lengths = &lengths[0]
    return 0


def forward(
    const float[:, :, :] x, const float[:, ::1] wt, const float[::1] bias,
    const float[:, :, :] initial_state, const int[:, :] seq_start, const int[::1] lengths,
    float[:, :, :] y, float[:, :, :] final_state, bint silu, int threads,
):
    """Write y (B, L, E) and final_state (B, K-1, E) of `Backend.conv1d`.

    x (B, L, E), initial_state, y and final_state are float32 with contiguous channels and any other
    strides; wt is w transposed, (K, E); bias (E), initial_state (B, K-1, E), seq_start (B, L) and
    lengths (B) int32 may be None. The caller has checked shapes and that 1 <= lengths <= L.
    """
    cdef Conv job
    set_inputs(&job, x, wt, bias, initial_state, seq_start, lengths, silu)
    unit(y, "y")
    job.y, job.y_b, job.y_t = &y[0, 0, 0], by(y.strides[0]), by(y.strides[1])
    if job.K > 1:
        unit(final_state, "final_state")
        job.final, job.final_b, job.final_t = (
            &final_state[0, 0, 0], by(final_state.strides[0]), by(final_state.strides[1])
        )
    with nogil:
        parallel_for(forward_task, &job, job.B * tasks_of(job.E, TILE), threads)


def backward(
    const float[:, :, :] dy, const float[:, :, :] d_final_state, const float[:, :, :] x,
    const float[:, ::1] wt, const float[::1] bias, const float[:, :, :] initial_state,
    const int[:, :] seq_start, const int[::1] lengths, float[:, :, :] dx, float[:, :] dw, float[::1] dbias,
    float[:, :, :] d_initial_state, bint silu, int threads,
):
    """Gradients of `forward`: write dx (B, L, E) and d_initial_state (B, K-1, E), add to dw (E, K) and
    dbias (E).

    d_final_state, dw, dbias and d_initial_state may be None; the other arguments are those of the
    forward call. Takes (K + 1) E float64 of memory for each of up to 16 groups of batch rows.
    """
    cdef Conv job
    cdef Py_ssize_t workers, e, k, g, E, K
    set_inputs(&job, x, wt, bias, initial_state, seq_start, lengths, silu)
    E, K = job.E, job.K
    unit(dy, "dy")
    job.dy, job.dy_b, job.dy_t = &dy[0, 0, 0], by(dy.strides[0]), by(dy.strides[1])
    unit(dx, "dx")
    job.dx, job.dx_b, job.dx_t = &dx[0, 0, 0], by(dx.strides[0]), by(dx.strides[1])
    if d_final_state is not None and K > 1:
        unit(d_final_state, "d_final_state")
        job.d_final, job.d_final_b, job.d_final_t = (
            &d_final_state[0, 0, 0], by(d_final_state.strides[0]), by(d_final_state.strides[1])
        )
    if d_initial_state is not None and K > 1:
        unit(d_initial_state, "d_initial_state")
        job.d_init, job.d_init_b, job.d_init_t = (
            &d_initial_state[0, 0, 0], by(d_initial_state.strides[0]), by(d_initial_state.strides[1])
        )
    job.groups = min(job.B, <Py_ssize_t> GROUPS)
    workers = max(1, min(<Py_ssize_t> threads, job.groups * tasks_of(E, TILE)))
    try:
        job.scratch = <float *> malloc(workers * (2 * K + 1) * TILE * sizeof(float))
        if job.scratch == NULL:
            raise MemoryError("conv1d_backward: no memory for scratch")
        if dw is not None or dbias is not None:
            job.partial = <double *> malloc(job.groups * (K + 1) * E * sizeof(double))
            if job.partial == NULL:
                raise MemoryError("conv1d_backward: no memory for partial sums")
            memset(job.partial, 0, job.groups * (K + 1) * E * sizeof(double))
        with nogil:
            parallel_for(backward_task, &job, job.groups * tasks_of(E, TILE), threads)
            if job.partial != NULL:
                for g in range(1, job.groups):
                    for e in range((K + 1) * E):
                        job.partial[e] += job.partial[g * (K + 1) * E + e]
        if dw is not None:
            for e in range(E):
                for k in range(K):
                    dw[e, k] += <float> job.partial[k * E + e]
        if dbias is not None:
            for e in range(E):
                dbias[e] += <float> job.partial[K * E + e]
    finally:
        free(job.scratch)
        free(job.partial)


def step(
    const float[:, :] x, float[:, :, :] state, const float[:, ::1] wt, const float[::1] bias, float[:, :] y,
    bint silu, int threads,
):
    """One step: write y (B, E) from x (B, E) and state (B, K-1, E), then shift x into the state.

    The bits are those of `forward` on one step with that initial state.
    """
    cdef Conv job
    memset(&job, 0, sizeof(Conv))
    job.B, job.L, job.E, job.K = x.shape[0], 1, x.shape[1], wt.shape[0]
    job.silu = silu
    if job.E > 1 and (x.strides[1] != sizeof(float) or y.strides[1] != sizeof(float)):
        raise ValueError("x and y: the last axis must be contiguous")
    job.x, job.x_b = &x[0, 0], by(x.strides[0])
    job.y, job.y_b = &y[0, 0], by(y.strides[0])
    job.w = &wt[0, 0]
    if bias is not None:
        job.bias = &bias[0]
    if job.K > 1:
        unit(state, "state")
        job.final, job.final_b, job.final_t = &state[0, 0, 0], by(state.strides[0]), by(state.strides[1])
        job.init, job.init_b, job.init_t = job.final, job.final_b, job.final_t
    with nogil:
        parallel_for(step_task, &job, job.B * tasks_of(job.E, TILE), threads)
