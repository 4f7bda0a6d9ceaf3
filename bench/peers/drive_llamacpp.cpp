// llama.cpp as bench/engine.py drives it: JSON lines on standard input and output, over llama.h.
//
// Started by drive_llamacpp.py, which converts the checkpoint and chooses the settings; built by build_llamacpp.py. A
// step is what llama.cpp's own server does for a batch: one llama_decode over a row per sequence, then its greedy
// sampler on the logits of every row.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <unistd.h>
#include <vector>

#include "ggml.h"
#include "llama.h"
#include "nlohmann/json.hpp"

using Tokens = std::vector<llama_token>;
using json = nlohmann::json;

template <auto release>
struct Released {
    template <class T>
    void operator()(T * object) const { release(object); }
};
using Model = std::unique_ptr<llama_model, Released<llama_model_free>>;
using Context = std::unique_ptr<llama_context, Released<llama_free>>;
using Sampler = std::unique_ptr<llama_sampler, Released<llama_sampler_free>>;

// What one row of a batch is: a token of a sequence, at its position, with or without logits.
struct Row {
    llama_token token;
    llama_pos position;
    llama_seq_id sequence;
    bool logits;
};

class Batch {
public:
    explicit Batch(int most) : batch(llama_batch_init(most, 0, 1)) {}
    ~Batch() { llama_batch_free(batch); }
    Batch(const Batch &) = delete;

    void add(const Row & row) {
        const int i = batch.n_tokens++;
        batch.token[i] = row.token;
        batch.pos[i] = row.position;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = row.sequence;
        batch.logits[i] = row.logits;
    }

    llama_batch batch;
};

class Engine {
public:
    explicit Engine(const std::map<std::string, std::string> & flags)
        : threads(std::stoi(flags.at("--threads"))), most_rows(std::stoi(flags.at("--rows"))),
          most_tokens(std::stoi(flags.at("--context"))) {
        model.reset(llama_model_load_from_file(flags.at("--gguf").c_str(), llama_model_default_params()));
        if (!model) throw std::runtime_error("llama.cpp could not load " + flags.at("--gguf"));
        vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model.get()));
        sampler.reset(llama_sampler_chain_init(llama_sampler_chain_default_params()));
        llama_sampler_chain_add(sampler.get(), llama_sampler_init_greedy());
        prefill(Tokens(8, 1));      // the first pass reads the weights from the disk
    }

    json answer(const json & request) {
        if (request.contains("prefill")) return {{"seconds", prefill(request["prefill"].get<Tokens>())}};
        return {{"seconds", decode(request.at("decode").get<std::vector<Tokens>>(),
                                   request.at("forced").get<std::vector<Tokens>>())}};
    }

private:
    double prefill(const Tokens & prompt) {
        prepare(1, most_tokens, LLAMA_FLASH_ATTN_TYPE_DISABLED);
        const auto begun = std::chrono::steady_clock::now();
        feed(prompt, 0);
        llama_sampler_sample(sampler.get(), context.get(), -1);
        return since(begun);
    }

    std::vector<double> decode(const std::vector<Tokens> & prompts, const std::vector<Tokens> & forced) {
        if (prompts.empty() || prompts.size() != forced.size()) throw std::runtime_error("rows of unequal number");
        const size_t steps = forced[0].size();
        size_t longest = 0;
        for (size_t i = 0; i < prompts.size(); i++) {
            if (forced[i].size() != steps) throw std::runtime_error("rows with unequal numbers of forced tokens");
            longest = std::max(longest, prompts[i].size() + steps);
        }
        const int rows = int(prompts.size());
        prepare(rows, int(longest), LLAMA_FLASH_ATTN_TYPE_ENABLED);
        for (int i = 0; i < rows; i++) feed(prompts[i], i);
        std::vector<double> seconds;
        for (size_t step = 0; step < steps; step++) {
            const auto begun = std::chrono::steady_clock::now();
            Batch batch(rows);
            for (int i = 0; i < rows; i++) {
                batch.add({checked(forced[i][step]), llama_pos(prompts[i].size() + step), i, true});
            }
            run(batch);
            for (int i = 0; i < rows; i++) llama_sampler_sample(sampler.get(), context.get(), i);
            seconds.push_back(since(begun));
        }
        return seconds;
    }

    // An empty cache for so many sequences of so many tokens. A context of another shape is made anew, as a server is
    // started for a number of slots. Each kind of request has what is faster for it: flash attention took a quarter of
    // the time in a decode step of 32 rows, and half as much again in a prompt of 2048 tokens. All else is as llama.cpp
    // has it by default.
    void prepare(int rows, int length, llama_flash_attn_type attention) {
        if (rows > most_rows || length > most_tokens) {
            throw std::runtime_error("asked for " + std::to_string(rows) + " rows of " + std::to_string(length) +
                                     " tokens, more than --rows or --context");
        }
        length = (length + 255) / 256 * 256;
        if (context && rows == slots && length == slot_tokens && attention == flash) {
            llama_memory_clear(llama_get_memory(context.get()), false);
            return;
        }
        context.reset();
        llama_context_params params = llama_context_default_params();
        params.n_ctx = uint32_t(rows * length);
        params.n_batch = uint32_t(std::max(rows, most_tokens));
        params.n_seq_max = uint32_t(rows);
        params.n_threads = params.n_threads_batch = threads;
        params.flash_attn_type = attention;
        params.no_perf = true;
        context.reset(llama_init_from_model(model.get(), params));
        if (!context) throw std::runtime_error("llama.cpp could not make a context");
        slots = rows;
        slot_tokens = length;
        flash = attention;
    }

    void feed(const Tokens & prompt, llama_seq_id sequence) {
        if (prompt.empty()) throw std::runtime_error("an empty prompt");
        if (int(prompt.size()) > slot_tokens) throw std::runtime_error("a prompt longer than --context");
        Batch batch(int(prompt.size()));
        for (size_t i = 0; i < prompt.size(); i++) {
            batch.add({checked(prompt[i]), llama_pos(i), sequence, i + 1 == prompt.size()});
        }
        run(batch);
    }

    void run(Batch & batch) {
        const int code = llama_decode(context.get(), batch.batch);
        if (code != 0) throw std::runtime_error("llama_decode answered " + std::to_string(code));
    }

    llama_token checked(llama_token token) const {
        if (token < 0 || token >= vocabulary) throw std::runtime_error("no token " + std::to_string(token));
        return token;
    }

    static double since(std::chrono::steady_clock::time_point begun) {
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
    }

    const int threads, most_rows, most_tokens;
    int vocabulary = 0, slots = 0, slot_tokens = 0;
    llama_flash_attn_type flash = LLAMA_FLASH_ATTN_TYPE_AUTO;
    Model model;
    Context context;
    Sampler sampler;
};

int main(int argc, char ** argv) {
    FILE * answers = fdopen(dup(STDOUT_FILENO), "w");
    dup2(STDERR_FILENO, STDOUT_FILENO);     // whatever the library prints goes there
    const auto say = [answers](const json & line) {
        std::fprintf(answers, "%s\n", line.dump().c_str());
        std::fflush(answers);
    };
    llama_log_set([](ggml_log_level level, const char * text, void *) {
        if (level >= GGML_LOG_LEVEL_WARN) std::fputs(text, stderr);
    }, nullptr);
    try {
        std::map<std::string, std::string> flags;
        for (int i = 1; i + 1 < argc; i += 2) flags[argv[i]] = argv[i + 1];
        Engine engine(flags);
        say({{"ready", true}, {"engine", "llama.cpp"}, {"version", flags.at("--version")},
             {"weights", flags.at("--weights")}, {"note", flags.at("--note")}});
        for (std::string line; std::getline(std::cin, line);) {
            try {
                say(engine.answer(json::parse(line)));
            } catch (const std::exception & error) {
                say({{"error", error.what()}});
            }
        }
    } catch (const std::exception & error) {
        say({{"error", error.what()}});
        return EXIT_FAILURE;
    }
    return EXIT_SUCCESS;
}
