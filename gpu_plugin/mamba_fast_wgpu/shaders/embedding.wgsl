// Rows of a table, and the sum of gradients into them.
//
// Backward without atomics: a workgroup for each position and block of columns. It has something to do only
// where no earlier position has the same id; then it adds up the rows of all positions with that id, in order.

struct Params {
    count: u32,         // ids
    width: u32,
    groups: u32,
    ids_width: u32,     // ids are themselves rows
    ids_offset: u32,
    ids_stride: u32,
    table_offset: u32,
    table_stride: u32,
    y_offset: u32,
    y_stride: u32,
    first: u32,         // id of the table's first row, where only a part of a large table is bound
    rows: u32,          // rows of that part
}

@group(0) @binding(0) var<storage, read> ids: array<i32>;
@group(0) @binding(1) var<storage, read> table: array<f32>;
@group(0) @binding(1) var<storage, read> dy: array<f32>;
@group(0) @binding(2) var<storage, read_write> y: array<f32>;
@group(0) @binding(2) var<storage, read_write> d_table: array<f32>;
@group(1) @binding(0) var<uniform> p: Params;

const WG: u32 = 256u;
const WORDS: u32 = 8u;

var<workgroup> found: array<atomic<u32>, 8>;
var<workgroup> earlier: u32;

fn id_at(i: u32) -> i32 {
    let row = i / p.ids_width;
    return ids[p.ids_offset + row * p.ids_stride + (i - row * p.ids_width)];
}

@compute @workgroup_size(256)
fn forward(
    @builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let i = group_index(group, groups) * WG + thread;
    let row = i / p.width;
    let col = i - row * p.width;
    if (row >= p.count) { return; }
    let at = u32(id_at(row)) - p.first;
    if (at < p.rows) {
        y[p.y_offset + row * p.y_stride + col] = table[p.table_offset + at * p.table_stride + col];
    }
}

@compute @workgroup_size(256)
fn backward(
    @builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let at = group_index(group, groups);
    if (at >= p.groups) { return; }
    let blocks = (p.width + WG - 1u) / WG;
    let position = at / blocks;
    let col = (at - position * blocks) * WG + thread;
    let id = id_at(position);
    let to = u32(id) - p.first;
    if (to >= p.rows) { return; }
    var total = 0.0;
    for (var start = 0u; start < p.count; start += WG) {
        if (thread < WORDS) { atomicStore(&found[thread], 0u); }
        workgroupBarrier();
        let i = start + thread;
        // Setting bits is the same in any order.
        if (i < p.count && id_at(i) == id) { atomicOr(&found[thread / 32u], 1u << (thread % 32u)); }
        workgroupBarrier();
        if (thread == 0u) {
            earlier = 0u;
            for (var word = 0u; word < WORDS; word++) {
                let bits = atomicLoad(&found[word]);
                if (bits != 0u && start + word * 32u + firstTrailingBit(bits) < position) { earlier = 1u; }
            }
        }
        if (workgroupUniformLoad(&earlier) != 0u) { return; }
        if (col < p.width) {
            for (var word = 0u; word < WORDS; word++) {
                var bits = atomicLoad(&found[word]);
                while (bits != 0u) {
                    let bit = firstTrailingBit(bits);
                    total += dy[p.y_offset + (start + word * 32u + bit) * p.y_stride + col];
                    bits &= bits - 1u;
                }
            }
        }
        workgroupBarrier();
    }
    if (col < p.width) { d_table[p.table_offset + to * p.table_stride + col] += total; }
}
