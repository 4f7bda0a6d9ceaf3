from tests.cli.fake_server import Script, chat, fake_server_beside, tokens, tripool


def answering(*scripts: Script):
    """A server that has a model and gives these answers in turn."""
    left = list(scripts)
    return lambda path, body: Script(body={"data": [{"id": "tiny"}]}) if path == "/v1/models" else left.pop(0)


def said(text: str, thought: str = "") -> Script:
    events = [(0.0, chat({"role": "assistant", "content": ""}))]
    events += [(0.0, chat({"reasoning": word, "reasoning_content": word})) for word in thought]
    events += [(0.0, chat({"content": word})) for word in text]
    usage = {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": len(text + thought)}}
    return Script([*events, (0.0, chat({}, "stop")), (0.0, usage), (0.0, "[DONE]")])


def test_a_conversation_over_a_pipe_carries_what_was_said_before():
    with fake_server_beside(answering(said("Hello."), said("12."))) as (url, seen):
        done = tripool("chat", "--url", url, "--temperature", "0", "--system", "Be brief.",
                       stdin="Hi\nWhat is 7 + 5?\n")

    assert done.exit_code == 0, done.output
    assert done.stdout == "Hello.\n12.\n"
    asked = [body for path, body in seen.requests if path == "/v1/chat/completions"]
    assert asked[1]["messages"] == [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."}, {"role": "user", "content": "What is 7 + 5?"}]
    assert asked[0]["temperature"] == 0
    assert asked[0]["model"] == "tiny"
    assert "4 prompt tokens, 6 tokens, first after" in done.stderr


def test_reset_forgets_and_quit_ends():
    with fake_server_beside(answering(said("A."), said("B."))) as (url, seen):
        done = tripool("chat", "--url", url, stdin="one\n/reset\ntwo\n/quit\nthree\n")

    assert done.stdout == "A.\nB.\n"
    asked = [body["messages"] for path, body in seen.requests if body]
    assert asked == [[{"role": "user", "content": "one"}], [{"role": "user", "content": "two"}]]


def test_a_thought_is_shown_but_not_sent_back():
    with fake_server_beside(answering(said("12", thought="7 and 5"), said("ok"))) as (url, seen):
        done = tripool("chat", "--url", url, "--thinking", stdin="What is 7 + 5?\nThanks\n")

    assert done.stdout == "7 and 5\n12\nok\n"
    asked = [body for path, body in seen.requests if body]
    assert asked[1]["messages"][1] == {"role": "assistant", "content": "12"}
    assert asked[0]["chat_template_kwargs"] == {"thinking": True, "enable_thinking": True}


def test_a_broken_answer_is_an_error_with_its_cause():
    lost = Script([*tokens(0.0, 0.0, 3)[:2], (0.0, {"error": {"message": "no member is left"}}), (0.0, "[DONE]")])
    with fake_server_beside(answering(lost)) as (url, _):
        done = tripool("chat", "--url", url, stdin="Hi\n")
    assert "no member is left" in str(done.exception)


def test_a_key_is_passed_on():
    with fake_server_beside(answering(said("A."))) as (url, seen):
        tripool("chat", "--url", url, "--api-key", "secret", stdin="Hi\n")
    assert all("Authorization: Bearer secret" in head for head in seen.heads)
