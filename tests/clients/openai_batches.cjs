// Whole batches by OpenAI's Node client: node openai_batches.cjs BASE_URL. Exits with 0 if all is as expected.
const assert = require("node:assert/strict");
const { setTimeout: sleep } = require("node:timers/promises");
const { default: OpenAI, toFile } = require("openai");

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const URL = "/v1/completions";

function line(customId, fields) {
  const body = { model: "default", prompt: "The whale is", max_tokens: 4, temperature: 0, ...fields };
  return JSON.stringify({ custom_id: customId, method: "POST", url: URL, body }) + "\n";
}

async function create(content, fields) {
  const file = await client.files.create({ file: await toFile(Buffer.from(content), "in.jsonl"), purpose: "batch" });
  assert.equal(file.bytes, Buffer.byteLength(content));
  assert.deepEqual(await client.files.retrieve(file.id), file);
  assert.equal(await (await client.files.content(file.id)).text(), content);
  return client.batches.create({ input_file_id: file.id, endpoint: URL, completion_window: "24h", ...fields });
}

async function poll(batch, status) {
  for (let wait = 0; batch.status !== status; wait++) {
    assert.ok(wait < 1200, JSON.stringify(batch));
    await sleep(50);
    batch = await client.batches.retrieve(batch.id);
  }
  return batch;
}

async function results(fileId) {
  const text = await (await client.files.content(fileId)).text();
  return text.split("\n").filter(Boolean).map((one) => JSON.parse(one));
}

async function completed() {
  const content = Array.from({ length: 20 }, (_, number) => line(`${number}`, { seed: number })).join("");
  let batch = await create(content + line("refused", { n: 0 }), { metadata: { by: "node" } });
  assert.equal(batch.status, "validating");
  batch = await poll(batch, "completed");
  assert.deepEqual(batch.metadata, { by: "node" });
  assert.deepEqual(batch.request_counts, { total: 21, completed: 20, failed: 1 });
  const live = await client.completions.create(JSON.parse(line("live")).body);
  const answered = await results(batch.output_file_id);
  assert.deepEqual(answered.map((one) => one.custom_id), Array.from({ length: 20 }, (_, number) => `${number}`));
  for (const one of answered) assert.equal(one.response.body.choices[0].text, live.choices[0].text);
  assert.equal(batch.usage.output_tokens, 20 * live.usage.completion_tokens);
  const [refused] = await results(batch.error_file_id);
  assert.equal(refused.response.status_code, 400);
  await assert.rejects(client.batches.cancel(batch.id), OpenAI.ConflictError);
  for (const id of [batch.input_file_id, batch.output_file_id, batch.error_file_id]) {
    assert.deepEqual(await client.files.delete(id), { id, object: "file", deleted: true });
    await assert.rejects(client.files.retrieve(id), OpenAI.NotFoundError);
  }
  return batch;
}

async function failed() {
  const batch = await poll(await create("{]\n" + line("1")), "failed");
  assert.deepEqual(batch.errors.data.map((error) => error.line), [1]);
  return batch;
}

async function cancelled() {
  const content = Array.from({ length: 200 }, (_, number) => line(`${number}`, { max_tokens: 400, ignore_eos: true }));
  let batch = await poll(await create(content.join("")), "in_progress");
  await assert.rejects(client.files.delete(batch.input_file_id), OpenAI.ConflictError);
  assert.equal((await client.batches.cancel(batch.id)).status, "cancelling");
  batch = await poll(batch, "cancelled");
  const { total, completed, failed } = batch.request_counts;
  assert.equal(completed + failed, total);
  const unrun = await results(batch.error_file_id);
  assert.ok(unrun.length > 0);
  for (const one of unrun) assert.equal(one.error.code, "batch_cancelled");
  return batch;
}

async function listed(batches) {
  const ids = [];
  for await (const batch of client.batches.list({ limit: 2 })) ids.push(batch.id);
  assert.deepEqual(ids.slice(0, batches.length), batches.map((batch) => batch.id).reverse());
  const files = [];
  for await (const file of client.files.list({ limit: 1, purpose: "batch_output" })) files.push(file.id);
  assert.equal(new Set(files).size, files.length);
  const last = batches.at(-1);
  assert.ok(files.includes(last.error_file_id));
}

async function main() {
  const batches = [];
  for (const run of [completed, failed, cancelled]) batches.push(await run());
  await listed(batches);
  const file = await toFile(Buffer.from("x"), "x");
  await assert.rejects(client.files.create({ file, purpose: "fine-tune" }), OpenAI.BadRequestError);
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
