// The scan's gate in the backward pass where a device has too few bindings to do it in scan_backward.wgsl:
// gate_gradient before it, gate_finish after it. Both are elementwise over (B, L, E).

override MASKED: bool = false;

struct Params {
    batch: u32,
    length: u32,
    row_step: u32,       // rows from one batch row to the next
    width: u32,
    flags_at: u32,       // offset in packed, in vec4
    unused: u32,
    z: vec2<u32>,        // views: offset and row stride, in elements
    dy: vec2<u32>,
    du: vec2<u32>,
    dz: vec2<u32>,
}

@group(1) @binding(0) var<uniform> params: Params;
@group(0) @binding(0) var<storage, read> z_in: array<f32>;
@group(0) @binding(1) var<storage, read> dy_in: array<f32>;
@group(0) @binding(2) var<storage, read> packed: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read_write> du_out: array<f32>;
@group(0) @binding(4) var<storage, read_write> dz_out: array<f32>;

// du = dy silu(z)
@compute @workgroup_size(64)
fn gate_gradient(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
                 @builtin(local_invocation_index) lane: u32) {
    let i = group_index(group, groups) * 64u + lane;
    let e = i % params.width;
    let t = (i / params.width) % params.length;
    let batch = i / params.width / params.length;
    if batch >= params.batch {
        return;
    }
    let row = batch * params.row_step + t;
    let gate = z_in[params.z.x + row * params.z.y + e];
    du_out[params.du.x + row * params.du.y + e] = dy_in[params.dy.x + row * params.dy.y + e] * silu(gate);
}

// dz = dy silu'(z) y, where dz holds y
@compute @workgroup_size(64)
fn gate_finish(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
               @builtin(local_invocation_index) lane: u32) {
    let i = group_index(group, groups) * 64u + lane;
    let e = i % params.width;
    let t = (i / params.width) % params.length;
    let batch = i / params.width / params.length;
    if batch >= params.batch {
        return;
    }
    let row = batch * params.row_step + t;
    let gate = z_in[params.z.x + row * params.z.y + e];
    let at = params.dz.x + row * params.dz.y + e;
    let dy = dy_in[params.dy.x + row * params.dy.y + e];
    var out = dy * silu_prime(gate) * dz_out[at];
    if MASKED {
        let quads = (params.length + 3u) / 4u;
        if packed[params.flags_at + batch * quads + t / 4u][t % 4u] == 2.0 {
            out = 0.0;
        }
    }
    dz_out[at] = out;
}
