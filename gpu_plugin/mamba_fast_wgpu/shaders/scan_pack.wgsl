// Small operands of the scan in one buffer, in the layout that its kernels read (they would need more
// bindings than a device has to offer, and aligned vec4 loads need rows that are a multiple of 4 long):
//
//   channels   E rows of NJ + 1 vec4: A (padded with -1), then (delta_bias, D, 0, 0)
//   rows       B L rows of 2 NJ vec4: b, then c (padded with 0)
//   flags      B rows of ceil(L / 4) vec4, one number a step: 0, 1 for a restart, 2 at and beyond the
//              row's length (MASKED only)
//
// b and c beyond a row's length are 0. NJ = ceil(N / 4).

override NJ: u32 = 4;
override HAS_LENGTHS: bool = false;
override HAS_SEQ_START: bool = false;

struct Params {
    batch: u32,
    length: u32,         // steps of this piece
    row_step: u32,       // rows from one batch row to the next
    first_step: u32,     // where the piece begins
    width: u32,
    states: u32,
    rows_at: u32,        // offsets in packed, in vec4
    flags_at: u32,
    b: vec2<u32>,        // views: offset and row stride, in elements
    c: vec2<u32>,
    seq_start: vec2<u32>,
    lengths: vec2<u32>,
}

@group(1) @binding(0) var<uniform> params: Params;
@group(0) @binding(0) var<storage, read> b_in: array<f32>;
@group(0) @binding(1) var<storage, read> c_in: array<f32>;
@group(0) @binding(2) var<storage, read> starts_in: array<i32>;
@group(0) @binding(3) var<storage, read> lengths_in: array<i32>;
@group(0) @binding(4) var<storage, read_write> packed: array<vec4<f32>>;

fn length_of(batch: u32) -> u32 {
    if HAS_LENGTHS {
        let whole = u32(lengths_in[params.lengths.x + batch]);
        return min(max(whole, params.first_step) - params.first_step, params.length);
    }
    return params.length;
}

// One invocation for four states of one row.
@compute @workgroup_size(64)
fn pack_rows(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let i = group_index(group, groups) * 64u + lane;
    let row = i / NJ;
    let j = i % NJ;
    if row >= params.batch * params.length {
        return;
    }
    let batch = row / params.length;
    let t = row % params.length;
    let source = batch * params.row_step + t;
    let inside = t < length_of(batch);
    var vb = vec4<f32>(0.0);
    var vc = vec4<f32>(0.0);
    for (var k = 0u; k < 4u; k = k + 1u) {
        let n = 4u * j + k;
        if inside && n < params.states {
            vb[k] = b_in[params.b.x + source * params.b.y + n];
            vc[k] = c_in[params.c.x + source * params.c.y + n];
        }
    }
    packed[params.rows_at + row * (2u * NJ) + j] = vb;
    packed[params.rows_at + row * (2u * NJ) + NJ + j] = vc;
}

// One invocation for four steps.
@compute @workgroup_size(64)
fn pack_flags(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let i = group_index(group, groups) * 64u + lane;
    let quads = (params.length + 3u) / 4u;
    let batch = i / quads;
    if batch >= params.batch {
        return;
    }
    var flags = vec4<f32>(0.0);
    for (var k = 0u; k < 4u; k = k + 1u) {
        let t = 4u * (i % quads) + k;
        if t >= length_of(batch) {
            flags[k] = 2.0;
        } else if HAS_SEQ_START {
            let start = starts_in[params.seq_start.x + batch * params.seq_start.y + params.first_step + t];
            flags[k] = select(0.0, 1.0, start != 0);
        }
    }
    packed[params.flags_at + i] = flags;
}
