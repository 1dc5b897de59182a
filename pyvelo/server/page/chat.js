// The chat: conversations over /v1/chat/completions, and a fork into two branches over /v1/sessions.

const byId = (id) => document.getElementById(id);

// A branch has its messages, and a session once it was forked.
class Branch {
  constructor(name) {
    this.name = name;
    this.messages = [];
    this.session = null;
    this.waiting = ""; // text for the next frame
    this.box = document.createElement("div");
    this.title = document.createElement("h3");
    this.title.id = `branch-${name}`;
    this.log = document.createElement("div");
    this.log.className = "log";
    this.log.tabIndex = 0;
    this.log.setAttribute("role", "log");
    this.log.setAttribute("aria-labelledby", this.title.id);
    this.box.append(this.title, this.log);
    byId("branches").append(this.box);
  }

  // Append a paragraph; text of users and models is never parsed.
  add(kind, text) {
    const part = document.createElement("div");
    part.className = kind;
    part.textContent = text;
    this.log.append(part);
    this.log.scrollTop = this.log.scrollHeight;
    return part;
  }

  // Append text to the last paragraph, once a frame however many tokens arrive.
  extend(text) {
    if (!this.waiting) requestAnimationFrame(() => this.flush());
    this.waiting += text;
  }

  flush() {
    if (!this.waiting) return;
    const log = this.log;
    const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    const part = log.lastChild;
    if (!part.firstChild) part.append(document.createTextNode(""));
    part.firstChild.appendData(this.waiting);
    this.waiting = "";
    if (atEnd) log.scrollTop = log.scrollHeight;
  }

  copyOf(other) {
    this.messages = [...other.messages];
    for (const part of other.log.children) this.add(part.className, part.textContent);
  }
}

export class Chat {
  constructor(call, eventsOf) {
    Object.assign(this, { call, eventsOf, aborter: null, forking: false, counter: 0 });
    this.restart();
    byId("chat").addEventListener("submit", (event) => {
      event.preventDefault();
      this.submit();
    });
    byId("message").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.submit();
    });
    byId("stop").addEventListener("click", () => this.aborter?.abort());
    byId("fork").addEventListener("click", () => this.fork());
    byId("restart").addEventListener("click", () => this.restart());
    addEventListener("pagehide", () => this.branches.forEach((branch) => this.drop(branch)));
  }

  // Return the name of a session of the chat.
  nameOf(session) {
    const branch = this.branches.find((each) => each.session === session);
    return branch && `chat ${branch.name}`;
  }

  restart() {
    this.aborter?.abort();
    for (const branch of this.branches ?? []) this.drop(branch);
    byId("branches").replaceChildren();
    this.branches = [new Branch("A")];
    this.showState();
  }

  async submit() {
    const text = byId("message").value.trim();
    if (!text || this.aborter || this.forking) return;
    byId("message").value = "";
    await this.send(text);
    byId("message").focus();
  }

  // Send a message to the chosen branches, which answer at once.
  async send(text) {
    const chosen = document.querySelector("input[name=target]:checked").value;
    const alone = this.branches.length === 1 || chosen === "both";
    const branches = alone ? this.branches : this.branches.filter((branch) => branch.name === chosen);
    this.aborter = new AbortController();
    this.showState("Answering");
    const answers = branches.map((branch) => this.answer(branch, text, this.aborter.signal));
    const notes = await Promise.all(answers);
    this.aborter = null;
    this.showState(notes.join(" "));
  }

  async answer(branch, text, signal) {
    branch.messages.push({ role: "user", content: text });
    branch.add("user", text);
    const part = branch.add("assistant", "");
    branch.log.setAttribute("aria-busy", "true"); // read the answer when it is complete
    let usage = null;
    try {
      for await (const [, data] of this.eventsOf(await this.ask(branch, signal))) {
        if (data === "[DONE]") break;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Error(chunk.error.message);
        usage = chunk.usage ?? usage;
        branch.extend(chunk.choices[0]?.delta?.content ?? chunk.choices[0]?.text ?? "");
      }
      branch.flush();
    } catch (error) {
      branch.flush();
      if (error.name !== "AbortError") {
        branch.add("error", `No answer: ${error.message}`);
        this.drop(branch); // its session may have the message or not: the messages are here
      }
    }
    branch.log.setAttribute("aria-busy", "false");
    if (part.textContent) branch.messages.push({ role: "assistant", content: part.textContent });
    else {
      branch.messages.pop();
      this.drop(branch);
    }
    if (!usage) return `${branch.name} stopped.`;
    const cached = usage.prompt_tokens_details.cached_tokens;
    const note = `${cached} of ${usage.prompt_tokens} prompt tokens cached, ${usage.completion_tokens} new`;
    branch.add("cached", note);
    return `${branch.name}: ${note}.`;
  }

  // Ask for the answer to the last message, as a stream.
  async ask(branch, signal) {
    const id = `chat-${branch.name}-${++this.counter}-${Math.random().toString(36).slice(2, 6)}`;
    const options = { method: "POST", headers: { "x-request-id": id }, signal };
    const wanted = { stream: true, stream_options: { include_usage: true } };
    if (branch.session) {
      const path = `/v1/sessions/${branch.session}`;
      try {
        const added = JSON.stringify({ messages: branch.messages.slice(-1) });
        await this.call(`${path}/append`, { method: "POST", body: added, signal });
        return await this.call(`${path}/generate`, { ...options, body: JSON.stringify(wanted) });
      } catch (error) {
        if (error.status !== 404) throw error;
        branch.session = null; // it has expired: the messages are here
      }
    }
    const body = JSON.stringify({ messages: branch.messages, ...wanted });
    return this.call("/v1/chat/completions", { ...options, body });
  }

  // Fork the conversation: sessions of both branches keep its blocks and share them.
  async fork() {
    const [first] = this.branches;
    const second = new Branch("B");
    this.forking = true;
    second.copyOf(first);
    this.branches.push(second);
    this.showState("Forking");
    let note = "Forked: both branches share the blocks of the conversation.";
    try {
      const body = JSON.stringify({ messages: first.messages });
      const made = await (await this.call("/v1/sessions", { method: "POST", body })).json();
      first.session = made.id;
      const forked = await this.call(`/v1/sessions/${made.id}/fork`, { method: "POST", body: "{}" });
      second.session = (await forked.json()).data[0].id;
    } catch (error) {
      note = `Forked without a session (${error.message}): blocks are shared while both answer.`;
    }
    this.forking = false;
    this.showState(note);
  }

  drop(branch) {
    if (!branch.session) return;
    const gone = { method: "DELETE", keepalive: true };
    this.call(`/v1/sessions/${branch.session}`, gone).catch(() => {});
    branch.session = null;
  }

  showState(note = "") {
    const busy = this.aborter !== null || this.forking;
    byId("chat-status").textContent = note;
    byId("send").disabled = busy;
    byId("restart").disabled = this.forking;
    byId("stop").disabled = this.aborter === null;
    byId("fork").disabled = busy || this.branches.length > 1 || !this.branches[0].messages.length;
    byId("targets").hidden = this.branches.length < 2;
    for (const branch of this.branches) {
      branch.title.textContent = this.branches.length > 1 ? `Branch ${branch.name}` : "Conversation";
    }
  }
}
