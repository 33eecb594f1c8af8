// Where there are too few channels to fill a device, time is cut into segments that run side by side. That
// takes the state at the beginning of each, which is made here in two steps: each segment on its own, from a
// state of 0 (`states`), and then, from the first to the last (`join_states`),
//
//   start[s + 1] = exp(A sum of Delta in s) start[s] + end[s]      (0 in place of exp(..) after a restart)
//
// and in the backward pass in the same way, from the last to the first, the gradient of the state at the end
// of each (`gradients`, `join_gradients`). The kernels are for 13 to 16 states and are laid out as those of
// scan_forward_quad.wgsl.
//
// Slot s of `kept` (`slot_step` apart) is the state at the beginning of segment s; slot s of `carry` the
// gradient of that at its end. `sums` holds (batch, segments, E): the sum of Delta, and 1 if there was
// a restart.

//#include scan_quad

override ZOH: bool = true;
override SOFTPLUS: bool = true;
override MASKED: bool = false;  // there are restarts or lengths
override READ_Z: bool = false;  // dy passes the gate here

struct Params {
    batch: u32,
    length: u32,
    row_step: u32,       // rows from one batch row to the next
    width: u32,
    slots: u32,          // kept states a batch row
    slot_step: u32,      // of them from one segment to the next
    segments: u32,
    segment_chunks: u32,
    rows_at: u32,        // offsets in packed, in vec4
    flags_at: u32,
    u: vec2<u32>,        // views: offset and row stride, in elements
    delta: vec2<u32>,
    z: vec2<u32>,
    dy: vec2<u32>,
}

@group(1) @binding(0) var<uniform> params: Params;
@group(0) @binding(0) var<storage, read> u_in: array<f32>;
@group(0) @binding(1) var<storage, read> delta_in: array<f32>;
@group(0) @binding(2) var<storage, read> z_in: array<f32>;
@group(0) @binding(3) var<storage, read> dy_in: array<f32>;
@group(0) @binding(4) var<storage, read> packed: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read_write> kept: array<vec4<f32>>;
@group(0) @binding(6) var<storage, read_write> carry: array<vec4<f32>>;
@group(0) @binding(7) var<storage, read_write> sums: array<vec2<f32>>;

var<workgroup> inputs: array<vec4<f32>, 256>;   // [8][WIDTH] of (Delta, u or gy, flag, 0)

struct Lane {
    lane: u32,
    e: u32,
    e_loads: u32,
    inside: bool,
}

fn lane_of(group: u32, lane: u32) -> Lane {
    let last = params.width - 1u;
    let e = group * WIDTH + lane / 4u;
    return Lane(lane, min(e, last), min(group * WIDTH + lane % WIDTH, last), e < params.width);
}

// (Delta, _, flag, 0) of one step of one channel; the bias is that channel's.
fn step_of(batch: u32, t: u32, e: u32, bias: f32) -> vec4<f32> {
    if t >= params.length {
        return vec4<f32>(0.0, 0.0, 2.0, 0.0);
    }
    var flag = 0.0;
    if MASKED {
        let quads = (params.length + 3u) / 4u;
        flag = packed[params.flags_at + batch * quads + t / 4u][t % 4u];
        if flag == 2.0 {
            return vec4<f32>(0.0, 0.0, 2.0, 0.0);
        }
    }
    let raw = delta_in[params.delta.x + e + (batch * params.row_step + t) * params.delta.y] + bias;
    if SOFTPLUS {
        return vec4<f32>(softplus(raw), 0.0, flag, select(0.0, raw, is_nan(raw)));
    }
    return vec4<f32>(raw, 0.0, flag, select(0.0, raw, is_nan(raw)));
}

@compute @workgroup_size(128)
fn states(
    @builtin(workgroup_id) group: vec3<u32>,
    //#if EMULATED
    @builtin(local_invocation_index) index: u32,
    //#else
    @builtin(subgroup_id) subgroup: u32,
    @builtin(subgroup_size) subgroup_lanes: u32,
    @builtin(subgroup_invocation_id) subgroup_lane: u32,
    //#endif
) {
    //#if !EMULATED
    let index = subgroup * subgroup_lanes + subgroup_lane;
    //#endif
    let me = lane_of(group.x, index);
    let q = me.lane % 4u;
    let batch = group.y;
    let segment = group.z;
    let a = packed[me.e * 5u + q];
    let a2 = a * LOG2E;
    let ia = 1.0 / a;
    let bias = packed[me.e_loads * 5u + 4u].x;
    var h = vec4<f32>(0.0);
    if segment == 0u {
        h = kept[(batch * params.slots * params.width + me.e) * 4u + q];
    }
    var sum = 0.0;
    var broken = false;
    let first = segment * params.segment_chunks;
    for (var chunk = first; chunk < first + params.segment_chunks; chunk = chunk + 1u) {
        for (var i = 0u; i < 2u; i = i + 1u) {
            let t = chunk * 8u + me.lane / WIDTH + 4u * i;
            var input = step_of(batch, t, me.e_loads, bias);
            if input.z < 2.0 {
                let u = u_in[params.u.x + me.e_loads + (batch * params.row_step + t) * params.u.y];
                input.y = select(u, input.w, is_nan(input.w));
            }
            inputs[(me.lane / WIDTH + 4u * i) * WIDTH + me.lane % WIDTH] = input;
        }
        workgroupBarrier();
        for (var i = 0u; i < 8u; i = i + 1u) {
            let input = inputs[i * WIDTH + me.lane / 4u];
            if MASKED && input.z == 1.0 {
                h = vec4<f32>(0.0);
                broken = true;
            }
            let row = batch * params.length + min(chunk * 8u + i, params.length - 1u);
            h = advance(h, input.x, input.y, packed[params.rows_at + row * 8u + q], a2, ia).h;
            sum = sum + input.x;
        }
        workgroupBarrier();
    }
    if me.inside {
        let slot = batch * params.slots + (segment + 1u) * params.slot_step;
        kept[(slot * params.width + me.e) * 4u + q] = h;
        if q == 0u {
            sums[(batch * params.segments + segment) * params.width + me.e] =
                vec2<f32>(sum, select(0.0, 1.0, broken));
        }
    }
}

@compute @workgroup_size(128)
fn gradients(
    @builtin(workgroup_id) group: vec3<u32>,
    //#if EMULATED
    @builtin(local_invocation_index) index: u32,
    //#else
    @builtin(subgroup_id) subgroup: u32,
    @builtin(subgroup_size) subgroup_lanes: u32,
    @builtin(subgroup_invocation_id) subgroup_lane: u32,
    //#endif
) {
    //#if !EMULATED
    let index = subgroup * subgroup_lanes + subgroup_lane;
    //#endif
    let me = lane_of(group.x, index);
    let q = me.lane % 4u;
    let batch = group.y;
    let segment = group.z + 1u;
    let a2 = packed[me.e * 5u + q] * LOG2E;
    let bias = packed[me.e_loads * 5u + 4u].x;
    let row = (batch * params.segments + segment) * params.width + me.e;
    var back = vec4<f32>(0.0);
    if segment == params.segments - 1u {
        back = carry[row * 4u + q];
    }
    let first = segment * params.segment_chunks;
    let chunks = (params.length + 7u) / 8u;
    for (var chunk = min(first + params.segment_chunks, chunks); chunk > first; chunk = chunk - 1u) {
        for (var i = 0u; i < 2u; i = i + 1u) {
            let t = (chunk - 1u) * 8u + me.lane / WIDTH + 4u * i;
            var input = step_of(batch, t, me.e_loads, bias);
            if input.z < 2.0 {
                let source = batch * params.row_step + t;
                input.y = dy_in[params.dy.x + me.e_loads + source * params.dy.y];
                //#if READ_Z
                input.y = input.y * silu(z_in[params.z.x + me.e_loads + source * params.z.y]);
                //#endif
                input.y = select(input.y, input.w, is_nan(input.w));
            }
            inputs[(me.lane / WIDTH + 4u * i) * WIDTH + me.lane % WIDTH] = input;
        }
        workgroupBarrier();
        for (var i = 0u; i < 8u; i = i + 1u) {
            let input = inputs[(7u - i) * WIDTH + me.lane / 4u];
            let t = min((chunk - 1u) * 8u + 7u - i, params.length - 1u);
            let vc = packed[params.rows_at + (batch * params.length + t) * 8u + 4u + q];
            let dh = fma(vec4<f32>(input.y), vc, back);
            back = fma(exp2_minus_one(input.x * a2), dh, dh);
            if MASKED && input.z == 1.0 {
                back = vec4<f32>(0.0);
            }
        }
        workgroupBarrier();
    }
    if me.inside {
        carry[(row - params.width) * 4u + q] = back;
    }
}

// x exp(A sum); 0 after a restart
fn passed_on(x: vec4<f32>, sum: vec2<f32>, a: vec4<f32>) -> vec4<f32> {
    let em1 = exp2_minus_one(sum.x * (a * LOG2E));
    return select(fma(em1, x, x), vec4<f32>(0.0), sum.y > 0.0);
}

// One invocation for four states of one channel of one batch row.
@compute @workgroup_size(64)
fn join_states(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
               @builtin(local_invocation_index) lane: u32) {
    let i = group_index(group, groups) * 64u + lane;
    let row = i / 4u;
    let batch = row / params.width;
    let e = row % params.width;
    if batch >= params.batch {
        return;
    }
    let a = packed[e * 5u + i % 4u];
    let stride = params.slot_step * params.width * 4u;
    let at = (batch * params.slots * params.width + e) * 4u + i % 4u;
    for (var s = 1u; s + 1u < params.segments; s = s + 1u) {
        let sum = sums[(batch * params.segments + s) * params.width + e];
        kept[at + (s + 1u) * stride] = kept[at + (s + 1u) * stride] + passed_on(kept[at + s * stride], sum, a);
    }
}

@compute @workgroup_size(64)
fn join_gradients(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
                  @builtin(local_invocation_index) lane: u32) {
    let i = group_index(group, groups) * 64u + lane;
    let row = i / 4u;
    let batch = row / params.width;
    let e = row % params.width;
    if batch >= params.batch {
        return;
    }
    let a = packed[e * 5u + i % 4u];
    let stride = params.width * 4u;
    let at = (batch * params.segments * params.width + e) * 4u + i % 4u;
    for (var s = params.segments - 2u; s > 0u; s = s - 1u) {
        let sum = sums[(batch * params.segments + s) * params.width + e];
        carry[at + (s - 1u) * stride] = carry[at + (s - 1u) * stride] + passed_on(carry[at + s * stride], sum, a);
    }
}
