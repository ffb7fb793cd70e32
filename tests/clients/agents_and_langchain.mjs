// OpenAI's agents and LangChain for Node: text, streams, tools. Usage: node FILE BASE_URL
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const require = createRequire(`${process.env.NODE_PATH}/`);
const load = (name) => import(pathToFileURL(require.resolve(name)));

const baseURL = process.argv[2];
const question = "What do whales eat?";

async function chatAnswer() {
  const messages = [{ role: "user", content: question }];
  const body = JSON.stringify({ model: "default", messages, max_tokens: 24, temperature: 0 });
  const headers = { "Content-Type": "application/json" };
  const answer = await fetch(`${baseURL}/chat/completions`, { method: "POST", headers, body });
  return (await answer.json()).choices[0].message.content;
}

async function langchain(expected, useResponsesApi) {
  const { ChatOpenAI } = await load("@langchain/openai");
  const { z } = await load("zod");
  const make = (maxTokens) =>
    new ChatOpenAI({ model: "default", apiKey: "none", temperature: 0, maxTokens, useResponsesApi, configuration: { baseURL } });
  assert.equal((await make(24).invoke(question)).text, expected);
  const deltas = [];
  for await (const chunk of await make(24).stream(question)) deltas.push(chunk.text);
  assert.equal(deltas.join(""), expected);
  assert.ok(deltas.length > 1);
  const look_up = { type: "function", function: { name: "look_up", description: "Looks a word up.", parameters: z.toJSONSchema(z.object({ word: z.enum(["whale", "seal"]) })) } };
  const call = (await make(60).bindTools([look_up], { tool_choice: "look_up" }).invoke(question)).tool_calls[0];
  assert.ok(["whale", "seal"].includes(call.args.word));
}

async function agents(useResponses) {
  const { Agent, OpenAIProvider, Runner, tool } = await load("@openai/agents");
  const { z } = await load("zod");
  const called = [];
  const look_up = tool({
    name: "look_up",
    description: "Looks a word up.",
    parameters: z.object({ word: z.enum(["whale", "seal"]) }),
    execute: async ({ word }) => {
      called.push(word);
      return "Whales eat krill.";
    },
  });
  const modelSettings = { temperature: 0, maxTokens: 200, toolChoice: "required", parallelToolCalls: false };
  const agent = new Agent({ name: "Biologist", instructions: "Be short.", model: "default", tools: [look_up], modelSettings });
  const modelProvider = new OpenAIProvider({ apiKey: "none", baseURL, useResponses });
  const runner = new Runner({ modelProvider, tracingDisabled: true });
  const whole = await runner.run(agent, question);
  assert.ok(whole.finalOutput);
  const streamed = await runner.run(agent, question, { stream: true });
  for await (const _ of streamed);
  assert.ok(streamed.finalOutput);
  assert.ok(called.length >= 2 && called.every((word) => ["whale", "seal"].includes(word)));
}

const expected = await chatAnswer();
const checks = {
  "langchain chats": () => langchain(expected, false),
  "langchain responses": () => langchain(expected, true),
  "agents over chats": () => agents(false),
  "agents over responses": () => agents(true),
};
for (const [name, check] of Object.entries(checks)) {
  try {
    await check();
    console.log(`${name}: passed`);
  } catch (error) {
    process.exitCode = 1;
    console.error(`${name}: FAILED`, error);
  }
}
