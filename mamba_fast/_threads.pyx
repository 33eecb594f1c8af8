# cython: language_level=3, freethreading_compatible=True
"""The thread pool that every kernel shares.

Design. OpenMP has two faults here: libgomp's idle threads spin and so fight the pool of the BLAS
that numpy brings (a training step took 1.7 times as long), and a forked child that enters a
parallel region hangs. This pool has neither: workers park on a lock as soon as no task is left,
and a forked child starts its own. It needs nothing but `pythread.h`, whose locks and threads are
part of the stable ABI and exist on every platform, and it never touches the interpreter, so the
workers run beside the GIL and beside free-threaded code.

One job runs at a time. A caller that finds the pool busy (two Python threads calling kernels at
once, or a kernel called from a task) runs its tasks itself, in order. Which thread runs a task is
decided at run time; kernels must therefore not let the result depend on it: partial sums are kept
for each task, never for each thread.
"""

import os

cdef extern from "pythread.h" nogil:
    ctypedef void *PyThread_type_lock
    PyThread_type_lock PyThread_allocate_lock()
    void PyThread_free_lock(PyThread_type_lock)
    int PyThread_acquire_lock(PyThread_type_lock, int wait)
    void PyThread_release_lock(PyThread_type_lock)
    unsigned long PyThread_start_new_thread(void (*)(void *) noexcept nogil, void *)

# PYTHREAD_INVALID_THREAD_ID, which the limited API leaves out.
cdef unsigned long NO_THREAD = <unsigned long> -1

cdef enum:
    MAX_THREADS = 256
    NOWAIT_LOCK = 0
    WAIT_LOCK = 1


cdef struct Job:
    task_fn fn
    void *ctx
    Py_ssize_t n_tasks
    Py_ssize_t next_task        # guarded by _take
    Py_ssize_t running          # workers that have not reported back; guarded by _take


cdef Job _job
cdef PyThread_type_lock _busy = NULL    # held by the caller whose job runs
cdef PyThread_type_lock _take = NULL    # guards the counters of _job
cdef PyThread_type_lock _done = NULL    # released by the last worker to finish
cdef PyThread_type_lock[MAX_THREADS] _wake   # one for each worker, released to start it
cdef int _n_workers = 0                 # threads started so far (the caller is not one of them)


cdef PyThread_type_lock _held_lock() noexcept nogil:
    cdef PyThread_type_lock lock = PyThread_allocate_lock()
    if lock != NULL:
        PyThread_acquire_lock(lock, WAIT_LOCK)
    return lock


cdef void _reset() noexcept:
    """Forget every thread and lock: at import, and in a forked child, where the threads of the
    parent do not exist and its locks may be held by nobody."""
    global _busy, _take, _done, _n_workers
    _busy = PyThread_allocate_lock()
    _take = PyThread_allocate_lock()
    _done = _held_lock()
    _n_workers = 0


cdef void _drain(int worker) noexcept nogil:
    """Take tasks until none is left."""
    cdef Py_ssize_t task
    while True:
        PyThread_acquire_lock(_take, WAIT_LOCK)
        task = _job.next_task
        _job.next_task += 1
        PyThread_release_lock(_take)
        if task >= _job.n_tasks:
            return
        _job.fn(_job.ctx, task, worker)


cdef void _worker_main(void *arg) noexcept nogil:
    cdef int worker = <int> <Py_ssize_t> arg
    cdef bint last
    while True:
        PyThread_acquire_lock(_wake[worker], WAIT_LOCK)
        _drain(worker)
        PyThread_acquire_lock(_take, WAIT_LOCK)
        _job.running -= 1
        last = _job.running == 0
        PyThread_release_lock(_take)
        if last:
            PyThread_release_lock(_done)


cdef void parallel_for(task_fn fn, void *ctx, Py_ssize_t n_tasks, int threads) noexcept nogil:
    global _n_workers
    cdef Py_ssize_t task
    cdef int helpers, worker
    if threads > MAX_THREADS:
        threads = MAX_THREADS
    helpers = <int> min(n_tasks, <Py_ssize_t> threads) - 1
    if helpers < 1 or not PyThread_acquire_lock(_busy, NOWAIT_LOCK):
        for task in range(n_tasks):
            fn(ctx, task, 0)
        return
    while _n_workers < helpers:
        worker = _n_workers + 1         # the caller is worker 0
        _wake[worker] = _held_lock()
        if _wake[worker] == NULL:
            break
        if PyThread_start_new_thread(_worker_main, <void *> <Py_ssize_t> worker) == NO_THREAD:
            PyThread_free_lock(_wake[worker])
            break                       # the system gives no more threads: go on with fewer
        _n_workers = worker
    helpers = min(helpers, _n_workers)
    _job.fn = fn
    _job.ctx = ctx
    _job.n_tasks = n_tasks
    _job.next_task = 0
    _job.running = helpers
    for worker in range(1, helpers + 1):
        PyThread_release_lock(_wake[worker])
    _drain(0)
    if helpers > 0:
        PyThread_acquire_lock(_done, WAIT_LOCK)
    PyThread_release_lock(_busy)


def after_fork_in_child() -> None:
    """Start afresh in a forked child. Registered with `os.register_at_fork` at import."""
    _reset()


def available_cpus() -> int:
    """The number of CPUs that this process may use (its affinity mask where the system has one)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


_reset()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=after_fork_in_child)
