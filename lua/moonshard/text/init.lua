-- SPDX-License-Identifier: MIT
--- Text: tokenizers of pretrained models.
---   local tokenizer = ms.text.tokenizer "gpt2/"
---   local ids = tokenizer:encode "The moon"
---   print(tokenizer:decode(ids))
require "moonshard.text.chat"                           -- adds methods
local chat = require "moonshard.text.generation.chat"
local errors = require "moonshard.core.errors"
local examples = require "moonshard.text.examples"
local files = require "moonshard.text.files"
local generation = require "moonshard.text.generation"
local packing = require "moonshard.text.packing"
local train = require "moonshard.text.train"

local M = {}

--- Reads a tokenizer from a model's folder or from a file: `tokenizer.json` (BPE of bytes or characters, WordPiece,
--- Unigram), GPT-2's `vocab.json` with `merges.txt`, a file of tiktoken, SentencePiece's model, a GGUF file, or the
--- file of Tokenizer:save. In a folder, tokenizer_config.json names the tokens of bos_id, eos_id and pad_id, and says
--- which of them SentencePiece's models add to texts. Needs Debian's libpcre2-8-0, and libutf8proc2 where text is
--- normalized. Errors: a file that is damaged, or that asks for what Moonshard does not have; the message names the
--- file and the key.
---@param path string  a folder or a file
---@param given? { pattern: string, special_tokens: table<string, integer> }  pattern: of tiktoken's files, which lack it: "cl100k" (default), "gpt2", "llama3", "o200k", "qwen2" or a regular expression that divides text into words; special_tokens: ids by token, of tiktoken's files
---@return TextTokenizer
function M.tokenizer(path, given) return files.open(path, given) end

--- Learns a byte-level BPE from texts: the most frequent pair of neighbouring tokens becomes a token, again and again.
--- Equal texts give equal tokens. TextTokenizer:save writes it as tokenizer.json.
---@param texts string|string[]  what to learn from
---@param given { vocab_size: integer, special_tokens: string[], pattern: string }  vocab_size: number of tokens, at least 256 and the special ones; special_tokens: come first, and are one token wherever they occur; pattern: "gpt2" (default), "llama3", "qwen2", "cl100k", "o200k" or a regular expression that divides text into words
---@return TextTokenizer
function M.train_bpe(texts, given) return train.bpe(texts, given) end

M.generate, M.stream = generation.generate, generation.stream
M.examples, M.pack = examples.read, packing.pack
M.chat = chat

return errors.closed(M, "text")
