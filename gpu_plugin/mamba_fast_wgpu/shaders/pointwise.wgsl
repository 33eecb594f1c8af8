// Elementwise kernels over rows that may lie apart.
//
// An operand is (rows, width) elements of type T with its own offset and row stride, all counted in T: a vector
// of four where every row of every operand starts at a multiple of four elements and is a multiple of four
// wide. Where all operands are contiguous the host gives a single row.

//#if VEC
alias T = vec4<f32>;
alias U = vec4<u32>;
//#else
alias T = f32;
alias U = u32;
//#endif

struct Params {
    rows: u32,
    width: u32,
    groups: u32,
    x_offset: u32,
    x_stride: u32,
    y_offset: u32,
    y_stride: u32,
    z_offset: u32,
    z_stride: u32,
    value: f32,
    bits: u32,
}

@group(0) @binding(0) var<storage, read> x: array<T>;
@group(0) @binding(1) var<storage, read> y: array<T>;
@group(0) @binding(2) var<storage, read_write> z: array<T>;
@group(0) @binding(0) var<storage, read> words: array<U>;
@group(0) @binding(2) var<storage, read_write> words_out: array<U>;
@group(1) @binding(0) var<uniform> p: Params;

const WG: u32 = 256u;

struct Place { inside: bool, x: u32, y: u32, z: u32 }

fn place(group: vec3<u32>, groups: vec3<u32>, thread: u32) -> Place {
    let at = group_index(group, groups);
    let i = at * WG + thread;
    let row = i / p.width;
    let col = i - row * p.width;
    return Place(
        at < p.groups && row < p.rows,
        p.x_offset + row * p.x_stride + col,
        p.y_offset + row * p.y_stride + col,
        p.z_offset + row * p.z_stride + col,
    );
}

// z = x + y
@compute @workgroup_size(256)
fn add(
    @builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let at = place(group, groups, thread);
    if (at.inside) { z[at.z] = x[at.x] + y[at.y]; }
}

// z += x
@compute @workgroup_size(256)
fn accumulate(
    @builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let at = place(group, groups, thread);
    if (at.inside) { z[at.z] = z[at.z] + x[at.x]; }
}

// z *= value
@compute @workgroup_size(256)
fn scale(
    @builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let at = place(group, groups, thread);
    if (at.inside) { z[at.z] = z[at.z] * p.value; }
}

// 32-bit words of any type
@compute @workgroup_size(256)
fn copy(
    @builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let at = place(group, groups, thread);
    if (at.inside) { words_out[at.z] = words[at.x]; }
}

@compute @workgroup_size(256)
fn fill(
    @builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let at = place(group, groups, thread);
    if (at.inside) { words_out[at.z] = U(p.bits); }
}
