// SPDX-License-Identifier: Apache-2.0
#include "server/page.h"

namespace fovea::server {
namespace {

constexpr std::string_view kPage = R"page(<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Fovea</title>
<style>
  :root { color-scheme: light dark; --line: color-mix(in srgb, currentColor 20%, transparent) }
  body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 46rem; padding: 0 1rem;
         min-height: 100vh; display: flex; flex-direction: column }
  header { display: flex; gap: 1rem; align-items: baseline; padding: 1rem 0 .5rem }
  h1 { font-size: 1.2rem; margin: 0 }
  #model, #speed { opacity: .6; font-size: .9rem }
  #chat { flex: 1 }
  .turn { white-space: pre-wrap; overflow-wrap: anywhere; padding: .6rem .9rem; margin: .6rem 0;
          border-radius: .6rem; border: 1px solid var(--line) }
  .user { margin-left: 20%; background: color-mix(in srgb, currentColor 7%, transparent) }
  .error { border-color: #c33; color: #c33 }
  form { position: sticky; bottom: 0; background: Canvas; padding: .6rem 0 1rem }
  textarea { width: 100%; box-sizing: border-box; font: inherit; padding: .6rem; resize: vertical;
             border: 1px solid var(--line); border-radius: .6rem }
  .row { display: flex; gap: .8rem; flex-wrap: wrap; align-items: center; margin-top: .4rem }
  label { font-size: .9rem; opacity: .8 }
  input { font: inherit; width: 5rem }
  #key { width: 9rem }
  button { font: inherit; padding: .3rem 1.1rem }
  #speed { margin-left: auto }
</style>
<header><h1>Fovea</h1><span id="model"></span></header>
<main id="chat"></main>
<form id="form">
  <textarea id="prompt" rows="2" placeholder="Ask something" autofocus></textarea>
  <div class="row">
    <button id="send">Send</button>
    <button id="stop" type="button" disabled>Stop</button>
    <label>temperature <input id="temperature" type="number" min="0" max="2" step="0.1"
      value="0.7"></label>
    <label>max tokens <input id="limit" type="number" min="1" value="512"></label>
    <label>API key <input id="key" type="password" autocomplete="off"></label>
    <span id="speed"></span>
  </div>
</form>
<script>
const byId = (id) => document.getElementById(id);
let running = null;
const messages = [];

function headers() {
  const all = {"content-type": "application/json"};
  if (byId("key").value) all.authorization = "Bearer " + byId("key").value;
  return all;
}

function addTurn(kind, text) {
  const turn = document.createElement("div");
  turn.className = "turn " + kind;
  turn.textContent = text;
  byId("chat").append(turn);
  turn.scrollIntoView({block: "end"});
  return turn;
}

async function problem(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return "HTTP " + response.status;
  }
}

async function* serverEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (!part.startsWith("data: ")) continue;
      if (part === "data: [DONE]") return;
      const data = JSON.parse(part.slice(6));
      if (data.error) throw new Error(data.error.message);
      yield data;
    }
  }
}

// Adds text to a turn once a frame, so that the page stays usable however fast tokens come.
function writerOf(turn) {
  const node = turn.appendChild(document.createTextNode(""));
  let waiting = "", scheduled = false;
  const flush = () => {
    scheduled = false;
    node.appendData(waiting);
    waiting = "";
    turn.scrollIntoView({block: "end"});
  };
  const add = (text) => {
    waiting += text;
    if (scheduled) return;
    scheduled = true;
    requestAnimationFrame(flush);
  };
  return {add, flush};
}

async function ask(prompt) {
  addTurn("user", prompt);
  messages.push({role: "user", content: prompt});
  const answer = addTurn("assistant", "");
  const writer = writerOf(answer);
  running = new AbortController();
  byId("send").disabled = true;
  byId("stop").disabled = false;
  let tokens = 0, first = 0;
  try {
    const response = await fetch("/v1/chat/completions", {
      method: "POST", headers: headers(), signal: running.signal,
      body: JSON.stringify({
        messages, stream: true,
        temperature: Number(byId("temperature").value), max_tokens: Number(byId("limit").value),
      }),
    });
    if (!response.ok) throw new Error(await problem(response));
    for await (const data of serverEvents(response)) {
      const choice = data.choices[0];
      if (!choice || choice.delta.role) continue;
      writer.add(choice.delta.content ?? "");
      const now = performance.now();
      if (tokens++ === 0) first = now;
      const seconds = (now - first) / 1000;
      if (seconds > 0) {
        byId("speed").textContent = ((tokens - 1) / seconds).toFixed(1) + " tokens/s";
      }
    }
  } catch (error) {
    if (error.name !== "AbortError") addTurn("error", error.message);
  }
  writer.flush();
  if (answer.textContent) {
    messages.push({role: "assistant", content: answer.textContent});
  } else {
    messages.pop();
  }
  running = null;
  byId("send").disabled = false;
  byId("stop").disabled = true;
}

byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const prompt = byId("prompt").value.trim();
  if (!prompt || running) return;
  byId("prompt").value = "";
  ask(prompt);
});
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("form").requestSubmit();
});
byId("stop").addEventListener("click", () => running?.abort());

async function showModel() {
  const response = await fetch("/v1/models", {headers: headers()});
  if (response.ok) byId("model").textContent = (await response.json()).data[0].id;
}
byId("key").addEventListener("change", showModel);
showModel();
</script>
</html>
)page";

}  // namespace

std::string_view chat_page() { return kPage; }

std::string_view page_policy() {
  return "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; "
         "style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
}

}  // namespace fovea::server
