// OpenAI's Node client and the AI SDK's providers: text, streams and tools. Usage: node openai_and_ai_sdk.cjs BASE_URL
"use strict";
const assert = require("node:assert/strict");
const { OpenAI } = require("openai");
const { generateText, streamText, jsonSchema, tool } = require("ai");
const { createOpenAI } = require("@ai-sdk/openai");
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");

const baseURL = process.argv[2];
const prompt = "What do whales eat?";
const parameters = {
  type: "object",
  properties: { word: { type: "string", enum: ["whale", "seal"] } },
  required: ["word"],
  additionalProperties: false,
};

async function chatAnswer() {
  const body = { model: "default", messages: [{ role: "user", content: prompt }], max_tokens: 24, temperature: 0 };
  const headers = { "Content-Type": "application/json" };
  const answer = await fetch(`${baseURL}/chat/completions`, { method: "POST", headers, body: JSON.stringify(body) });
  return (await answer.json()).choices[0].message.content;
}

async function openaiResponses(expected) {
  const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
  const fields = { model: "default", input: prompt, max_output_tokens: 24, temperature: 0 };
  const whole = await client.responses.create(fields);
  assert.equal(whole.output_text, expected);
  const deltas = [];
  const stream = client.responses.stream(fields).on("response.output_text.delta", (event) => deltas.push(event.delta));
  assert.equal((await stream.finalResponse()).output_text, expected);
  assert.equal(deltas.join(""), expected);
  assert.ok(deltas.length > 1);
  const tools = [{ type: "function", name: "look_up", parameters, strict: true }];
  const choice = { tools, tool_choice: { type: "function", name: "look_up" }, max_output_tokens: 60 };
  const [call] = (await client.responses.create({ ...fields, ...choice })).output.filter((item) => item.type === "function_call");
  assert.ok(["whale", "seal"].includes(JSON.parse(call.arguments).word));
  const result = { type: "function_call_output", call_id: call.call_id, output: "Krill." };
  const input = [{ role: "user", content: prompt }, call, result];
  assert.ok((await client.responses.create({ ...fields, input })).output_text);
}

async function aiSdk(model, expected, providerOptions) {
  const fields = { model, prompt, maxOutputTokens: 24, temperature: 0, maxRetries: 0, providerOptions };
  assert.equal((await generateText(fields)).text, expected);
  const failed = [];
  const streamed = streamText({ ...fields, onError: ({ error }) => failed.push(error) });
  const deltas = [];
  for await (const delta of streamed.textStream) deltas.push(delta);
  assert.deepEqual(failed, []);
  assert.equal(deltas.join(""), expected);
  assert.ok(deltas.length > 1);
  const called = [];
  const look_up = tool({
    description: "Looks a word up.",
    inputSchema: jsonSchema(parameters),
    execute: async ({ word }) => {
      called.push(word);
      return "Krill.";
    },
  });
  const agent = {
    ...fields,
    tools: { look_up },
    maxOutputTokens: 60,
    stopWhen: ({ steps }) => steps.length === 2,
    // the model must call in the first step, and answer in the second one
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : { type: "tool", toolName: "look_up" } }),
  };
  const whole = await generateText(agent);
  assert.equal(whole.steps.length, 2);
  assert.ok(whole.text);
  const stream = streamText({ ...agent, onError: ({ error }) => failed.push(error) });
  assert.equal(await stream.text, whole.text);
  assert.deepEqual(failed, []);
  assert.ok(called.length >= 2 && called.every((word) => ["whale", "seal"].includes(word)));
}

async function aiSdkConversation(openai) {
  const limits = { model: openai("default"), maxOutputTokens: 12, temperature: 0 };
  const question = { role: "user", content: prompt };
  const first = await generateText({ ...limits, messages: [question] });
  const messages = [question, ...first.response.messages, { role: "user", content: "And seals?" }];
  // by default it names the first answer in place of sending it, and the refusal says what to set
  await assert.rejects(generateText({ ...limits, maxRetries: 0, messages }), /providerOptions: \{openai: \{store: false\}\}/);
  const second = await generateText({ ...limits, messages, providerOptions: { openai: { store: false } } });
  assert.ok(second.text);
}

async function main() {
  const expected = await chatAnswer();
  const openai = createOpenAI({ baseURL, apiKey: "none" });
  const compatible = createOpenAICompatible({ name: "toka", baseURL, apiKey: "none" });
  const checks = {
    "openai responses": () => openaiResponses(expected),
    "@ai-sdk/openai": () => aiSdk(openai("default"), expected),
    "@ai-sdk/openai, store false": () => aiSdk(openai("default"), expected, { openai: { store: false } }),
    "@ai-sdk/openai, a conversation": () => aiSdkConversation(openai),
    "@ai-sdk/openai chat": () => aiSdk(openai.chat("default"), expected),
    "@ai-sdk/openai-compatible": () => aiSdk(compatible("default"), expected),
  };
  let failures = 0;
  for (const [name, check] of Object.entries(checks)) {
    try {
      await check();
      console.log(`${name}: passed`);
    } catch (error) {
      failures += 1;
      console.error(`${name}: FAILED`, error);
    }
  }
  process.exitCode = failures ? 1 : 0;
}

main();
