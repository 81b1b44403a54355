// Ollama's package for JavaScript asks the server of OLLAMA_HOST, and prints what it is told as one JSON object.
import { Ollama } from "ollama";

const client = new Ollama({ host: process.env.OLLAMA_HOST });
const asked = { model: (await client.list()).models.at(-1).model, messages: [{ role: "user", content: "Say hello." }] };
let stream = "";
for await (const part of await client.chat({ ...asked, stream: true })) stream += part.message.content;

const city = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ type: "function", function: { name: "weather", parameters: city } }];
const { message } = await client.chat({ ...asked, tools });
const result = { role: "tool", tool_name: "weather", content: "rain in " + message.tool_calls[0].function.arguments.city };
const calls = await client.chat({ ...asked, messages: [...asked.messages, message, result], tools });

const first = await client.generate({ model: asked.model, prompt: "Say hello." });
const then = await client.generate({ model: asked.model, prompt: "Ada is 36 years old.", context: first.context });
const refused = await client.pull({ model: "other" }).catch((error) => error.status_code);
console.log(JSON.stringify({ stream, calls: calls.message.content, form: JSON.parse(then.response), refused }));
