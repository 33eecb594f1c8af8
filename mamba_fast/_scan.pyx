# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: initializedcheck=False, freethreading_compatible=True
"""The selective scan: forward, backward and single step, in float32.

Formulas: SPEC 2.6 to 2.10 and 3 (Gu and Dao 2023, algorithm 2), with the gate and the D skip.

Design
------
Memory. Tensors are (B, L, E), channels last. No (B, L, E, N) array exists: the forward pass keeps
the state at the start of every T steps (B * L * E * N / T floats), from which the backward pass
recomputes T steps at a time into a buffer that stays in cache.

Vectors. The inner loops run over LANES channels for two states n at a time, with the states in small
arrays that the compiler keeps in vector registers along t (3.5 ns for 16 state updates with AVX-512 at
2.6 GHz, 4.9 for zoh; one state at a time in memory took twice that). Vectors over n would fit N = 16
only, and need a horizontal sum each step. Inputs are copied to a tile of T steps and W channels first;
a tail of fewer than W channels, and the state that makes an odd N even, are zeros, which add nothing.

Tasks. One task is one batch row and one slab of channels. Its partial sums (dB, dC over its
channels; dA, dD and the bias's gradient over its time steps) go to buffers of its own and are added
up in a fixed order afterwards, and the slab width depends on the shape alone: the bits of a result
do not depend on the number of threads.

Accuracy. exp(z), z = Delta A, is kept as s (1 + p) with s a power of two: h decays to s (p h + h),
which neither rounds a decay near 1 (an error that would be the same each step, and add up over the
memory of the state) nor loses the digits of one near 0; so does its gradient on the way back. The
input is weighed by expm1(z) / A = (s p + (s - 1)) / A, which does not cancel. |A| is taken as at
least 1e-12, where the difference from 0 is beyond float32 for every Delta. The A gradient needs
Delta^2 phi'(z), by a polynomial for |z| below ln(2)/2 and by the closed form above. softplus'(x)
comes as -expm1(-softplus(x)), which is exact for small Delta and saves keeping x.
"""

from libc.stdlib cimport malloc, free
from libc.string cimport memcpy, memset
from libc.stdint cimport uintptr_t

from mamba_fast._threads cimport parallel_for

cdef extern from "_vecmath.h" nogil:
    ctypedef float *mf_out
    ctypedef const float *mf_in
    float MF_LOG2E
    float NAN "MF_NAN"
    float INFINITY "MF_INFINITY"
    float mf_abs(float)
    void mf_exp2_parts(float, float *s, float *p)
    float mf_exp2m1(float)
    float mf_sigmoid(float)
    float mf_softplus(float)
    float mf_phi_prime_near_zero(float)

cdef enum:
    T = 32              # steps between kept states
    W = 64              # channels in a tile
    LANES = 16          # channels in the inner loops: one to four vectors; divides W
    # Floats between scratch arrays, so that their rows do not share the last 12 bits of their addresses:
    # a load there waits for an earlier store to the other.
    STAGGER = 144
    WIDE_SLAB = 256     # channels in a task: a multiple of W

ctypedef const int *ints

cdef float SMALLEST_A = 1e-12
cdef float SERIES_BELOW = 0.34657359   # ln(2) / 2


# The inner loops, which differ by discretisation. They are called through pointers: inlined into a task,
# they would lose what the compiler knows of them (that nothing overlaps) and with it their speed.
ctypedef void (*scan_pair_fn)(Py_ssize_t steps, mf_in delta, mf_in x, mf_out y, mf_in b, mf_in c, Py_ssize_t stride,
                              const float *a2, const float *ia, float *h) noexcept nogil
ctypedef void (*keep_pair_fn)(Py_ssize_t steps, mf_in delta, mf_in x, mf_out y, mf_in b, mf_in c, Py_ssize_t stride,
                              const float *a2, const float *ia, mf_out states, mf_out parts) noexcept nogil
ctypedef void (*back_pair_fn)(Py_ssize_t steps, mf_in delta, mf_in x, mf_in gy, mf_in b, mf_in c, Py_ssize_t stride,
                              const float *a, const float *ia, mf_in states, mf_in parts, float *carry, float *da,
                              mf_out ddelta, mf_out dx, mf_out lane_b, mf_out lane_c) noexcept nogil


cdef struct Job:
    Py_ssize_t B, L, E, N
    Py_ssize_t pairs            # of states: N / 2, rounded up
    Py_ssize_t slab, n_slabs, n_chunks
    bint softplus, zoh
    scan_pair_fn scan_pair
    keep_pair_fn keep_pair
    back_pair_fn back_pair
    # inputs; *_b and *_t are strides in elements along batch and time
    const float *u
    Py_ssize_t u_b, u_t
    const float *delta
    Py_ssize_t delta_b, delta_t
    const float *b
    Py_ssize_t b_b, b_t
    const float *c
    Py_ssize_t c_b, c_t
    const float *z
    Py_ssize_t z_b, z_t
    const float *a
    Py_ssize_t a_e
    const float *d
    const float *bias
    const float *initial
    Py_ssize_t initial_b, initial_e
    ints seq_start
    Py_ssize_t seq_b
    ints lengths
    # forward outputs
    float *y
    Py_ssize_t y_b, y_t
    float *final
    Py_ssize_t final_b, final_e
    float *checkpoints          # (B, n_chunks, N, E), or NULL
    # backward
    const float *dy
    Py_ssize_t dy_b, dy_t
    const float *d_final
    Py_ssize_t d_final_b, d_final_e
    float *du
    Py_ssize_t du_b, du_t
    float *ddelta
    Py_ssize_t ddelta_b, ddelta_t
    float *dz
    Py_ssize_t dz_b, dz_t
    float *db
    Py_ssize_t db_b, db_t
    float *dc
    Py_ssize_t dc_b, dc_t
    float *d_initial
    Py_ssize_t d_initial_b, d_initial_e
    float *d_a                  # the last three are added to, or NULL
    Py_ssize_t d_a_e
    float *d_d
    float *d_bias
    float *part_db              # (n_slabs, B, L, N)
    float *part_dc
    float *part_da              # (B, N, E)
    float *part_dd              # (B, E)
    float *part_dbias           # (B, E)
    # one block of scratch for each thread
    float *scratch
    Py_ssize_t scratch_floats


cdef float *aligned(float *p) noexcept nogil:
    return <float *> ((<uintptr_t> p + 63) & ~(<uintptr_t> 63))


include "_scan_tile.pxi"
include "_scan_forward.pxi"
include "_scan_backward.pxi"
include "_scan_step.pxi"


def checkpoint_shape(Py_ssize_t B, Py_ssize_t L, Py_ssize_t E, Py_ssize_t N):
    """Shape of the float32 array of kept states that `forward` fills and `backward` reads."""
    return (B, (L + T - 1) // T, N, E)


cdef void choose_slab(Job *job) noexcept nogil:
    """Wide slabs share their loads of b and c and their lane sums; narrow ones make enough tasks when
    the batch is small. Depends on the shape alone."""
    cdef Py_ssize_t slab = WIDE_SLAB
    while slab > W and job.B * ((job.E + slab - 1) // slab) < 8:
        slab //= 2
    job.slab = slab
    job.n_slabs = (job.E + slab - 1) // slab
    job.n_chunks = (job.L + T - 1) // T


cdef int useful_threads(const Job *job, int threads) noexcept nogil:
    """Each thread has scratch of its own: no more of them than there are tasks."""
    return <int> max(<Py_ssize_t> 1, min(<Py_ssize_t> threads, job.B * job.n_slabs))


cdef void set_inputs(Job *job, const float[:, :, :] u, const float[:, :, :] delta, const float[:, :] a,
                     const float[:, :, :] b, const float[:, :, :] c, const float[:] d, const float[:, :, :] z,
                     const float[:] delta_bias, const int[:, :] seq_start, const int[:] lengths,
                     bint delta_softplus, bint zoh) noexcept:
    memset(job, 0, sizeof(Job))
    job.B = u.shape[0]
    job.L = u.shape[1]
    job.E = u.shape[2]
    job.N = a.shape[1]
    job.pairs = (job.N + 1) // 2
    job.softplus = delta_softplus
    job.zoh = zoh
    job.scan_pair = scan_pair_zoh if zoh else scan_pair_euler
    job.keep_pair = keep_pair_zoh if zoh else keep_pair_euler
    job.back_pair = back_pair_zoh if zoh else back_pair_euler
    job.u = &u[0, 0, 0]
    job.u_b = u.strides[0] // 4
    job.u_t = u.strides[1] // 4
    job.delta = &delta[0, 0, 0]
    job.delta_b = delta.strides[0] // 4
    job.delta_t = delta.strides[1] // 4
    job.a = &a[0, 0]
    job.a_e = a.strides[0] // 4
    job.b = &b[0, 0, 0]
    job.b_b = b.strides[0] // 4
    job.b_t = b.strides[1] // 4
    job.c = &c[0, 0, 0]
    job.c_b = c.strides[0] // 4
    job.c_t = c.strides[1] // 4
    if d is not None:
        job.d = &d[0]
    if z is not None:
        job.z = &z[0, 0, 0]
        job.z_b = z.strides[0] // 4
        job.z_t = z.strides[1] // 4
    if delta_bias is not None:
        job.bias = &delta_bias[0]
    if seq_start is not None:
        job.seq_start = &seq_start[0, 0]
        job.seq_b = seq_start.strides[0] // 4
    if lengths is not None:
        job.lengths = &lengths[0]


def forward(const float[:, :, :] u, const float[:, :, :] delta, const float[:, :] a, const float[:, :, :] b,
            const float[:, :, :] c, const float[:] d, const float[:, :, :] z, const float[:] delta_bias,
            const float[:, :, :] initial_state, const int[:, :] seq_start, const int[:] lengths,
            float[:, :, :] y, float[:, :, :] final_state, float[:, :, :, :] checkpoints,
            bint delta_softplus, bint zoh, int threads):
    """`Backend.selective_scan`. Writes y (B, L, E), final_state (B, E, N) and, unless None, checkpoints.

    All arrays have a contiguous last axis and no extent of 0 (the caller checks); d, z, delta_bias,
    initial_state, seq_start, lengths and checkpoints may be None.
    """
    cdef Job job
    cdef void *block
    set_inputs(&job, u, delta, a, b, c, d, z, delta_bias, seq_start, lengths, delta_softplus, zoh)
    choose_slab(&job)
    if initial_state is not None:
        job.initial = &initial_state[0, 0, 0]
        job.initial_b = initial_state.strides[0] // 4
        job.initial_e = initial_state.strides[1] // 4
    job.y = &y[0, 0, 0]
    job.y_b = y.strides[0] // 4
    job.y_t = y.strides[1] // 4
    job.final = &final_state[0, 0, 0]
    job.final_b = final_state.strides[0] // 4
    job.final_e = final_state.strides[1] // 4
    if checkpoints is not None:
        job.checkpoints = &checkpoints[0, 0, 0, 0]
    threads = useful_threads(&job, threads)
    job.scratch_floats = (forward_scratch(job.slab, job.pairs) + 31) // 16 * 16
    block = malloc((threads * job.scratch_floats + 16) * sizeof(float))
    if block == NULL:
        raise MemoryError("selective_scan: no memory for scratch")
    job.scratch = aligned(<float *> block)
    with nogil:
        parallel_for(forward_task, &job, job.B * job.n_slabs, threads)
    free(block)


def backward(const float[:, :, :] dy, const float[:, :, :] d_final_state, const float[:, :, :] u,
             const float[:, :, :] delta, const float[:, :] a, const float[:, :, :] b, const float[:, :, :] c,
             const float[:] d, const float[:, :, :] z, const float[:] delta_bias, const int[:, :] seq_start,
             const int[:] lengths, const float[:, :, :, :] checkpoints, float[:, :, :] du, float[:, :, :] ddelta,
             float[:, :, :] db, float[:, :, :] dc, float[:, :, :] dz, float[:, :] d_a, float[:] d_d,
             float[:] d_delta_bias, float[:, :, :] d_initial_state, bint delta_softplus, bint zoh, int threads):
    """`Backend.selective_scan_backward`. Writes du, ddelta, db, dc, dz (None without z) and
    d_initial_state (unless None); ADDS to d_a, d_d and d_delta_bias (each unless None)."""
    cdef Job job
    cdef void *block
    cdef float *p
    cdef Py_ssize_t rows
    set_inputs(&job, u, delta, a, b, c, d, z, delta_bias, seq_start, lengths, delta_softplus, zoh)
    choose_slab(&job)
    job.checkpoints = <float *> &checkpoints[0, 0, 0, 0]
    job.dy = &dy[0, 0, 0]
    job.dy_b = dy.strides[0] // 4
    job.dy_t = dy.strides[1] // 4
    if d_final_state is not None:
        job.d_final = &d_final_state[0, 0, 0]
        job.d_final_b = d_final_state.strides[0] // 4
        job.d_final_e = d_final_state.strides[1] // 4
    job.du = &du[0, 0, 0]
    job.du_b = du.strides[0] // 4
    job.du_t = du.strides[1] // 4
    job.ddelta = &ddelta[0, 0, 0]
    job.ddelta_b = ddelta.strides[0] // 4
    job.ddelta_t = ddelta.strides[1] // 4
    job.db = &db[0, 0, 0]
    job.db_b = db.strides[0] // 4
    job.db_t = db.strides[1] // 4
    job.dc = &dc[0, 0, 0]
    job.dc_b = dc.strides[0] // 4
    job.dc_t = dc.strides[1] // 4
    if dz is not None:
        job.dz = &dz[0, 0, 0]
        job.dz_b = dz.strides[0] // 4
        job.dz_t = dz.strides[1] // 4
    if d_initial_state is not None:
        job.d_initial = &d_initial_state[0, 0, 0]
        job.d_initial_b = d_initial_state.strides[0] // 4
        job.d_initial_e = d_initial_state.strides[1] // 4
    if d_a is not None:
        job.d_a = &d_a[0, 0]
        job.d_a_e = d_a.strides[0] // 4
    if d_d is not None:
        job.d_d = &d_d[0]
    if d_delta_bias is not None:
        job.d_bias = &d_delta_bias[0]
    threads = useful_threads(&job, threads)
    job.scratch_floats = (backward_scratch(job.slab, job.pairs) + 31) // 16 * 16
    rows = job.B * job.L
    block = malloc((16 + threads * job.scratch_floats + 2 * job.n_slabs * rows * job.N
                    + job.B * job.E * (job.N + 2)) * sizeof(float))
    if block == NULL:
        raise MemoryError("selective_scan_backward: no memory for scratch and partial sums")
    job.scratch = aligned(<float *> block)
    p = job.scratch + threads * job.scratch_floats
    job.part_db = p
    job.part_dc = p + job.n_slabs * rows * job.N
    job.part_da = job.part_dc + job.n_slabs * rows * job.N
    job.part_dd = job.part_da + job.B * job.N * job.E
    job.part_dbias = job.part_dd + job.B * job.E
    with nogil:
        parallel_for(backward_task, &job, job.B * job.n_slabs, threads)
        parallel_for(sum_slabs_task, &job, (rows + 63) // 64, threads)
        parallel_for(sum_rows_task, &job, (job.E + W - 1) // W, threads)
    free(block)


def step(const float[:, :] u, const float[:, :] delta, const float[:, :] a, const float[:, :] b,
         const float[:, :] c, const float[:] d, const float[:, :] z, const float[:] delta_bias,
         float[:, :, :] state, float[:, :] y, bint delta_softplus, bint zoh, int threads):
    """`Backend.selective_scan_step`: u, delta, z, y (B, E), b, c (B, N); updates state (B, E, N), writes y."""
    cdef StepJob job
    memset(&job, 0, sizeof(StepJob))
    job.E = u.shape[1]
    job.N = a.shape[1]
    job.blocks = (job.E + STEP_BLOCK - 1) // STEP_BLOCK
    job.softplus = delta_softplus
    job.zoh = zoh
    job.u = &u[0, 0]
    job.u_b = u.strides[0] // 4
    job.delta = &delta[0, 0]
    job.delta_b = delta.strides[0] // 4
    job.a = &a[0, 0]
    job.a_e = a.strides[0] // 4
    job.b = &b[0, 0]
    job.b_b = b.strides[0] // 4
    job.c = &c[0, 0]
    job.c_b = c.strides[0] // 4
    if d is not None:
        job.d = &d[0]
    if z is not None:
        job.z = &z[0, 0]
        job.z_b = z.strides[0] // 4
    if delta_bias is not None:
        job.bias = &delta_bias[0]
    job.state = &state[0, 0, 0]
    job.state_b = state.strides[0] // 4
    job.state_e = state.strides[1] // 4
    job.y = &y[0, 0]
    job.y_b = y.strides[0] // 4
    with nogil:
        parallel_for(step_task, &job, u.shape[0] * job.blocks, threads)
