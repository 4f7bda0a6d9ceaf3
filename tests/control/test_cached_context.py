"""What was computed before is found on the instance or in the pool, and stays there."""



from tests.control.builders import Instance, decode_with, request, whole_output
from tripool.control import context
from tripool.core import messages as m

# ---------------------------------------------------------------- cached context


def test_a_cached_prefix_is_not_computed_again():
    instance = Instance("hybrid", budget=64)
    shared = list(range(20))
    first, second = request(1, prompt=[*shared, 50]), request(2, prompt=[*shared, 60, 61])
    instance.prefill(first)
    instance.work()
    instance.prefill(second)
    instance.work()

    assert (instance.cached(1), instance.cached(2)) == ([0], [20])
    assert instance.output(2) == whole_output(second)
    assert instance.stats.local_hit_tokens == 20
    assert instance.is_at_rest()


def test_at_least_the_last_token_is_computed_even_if_the_whole_prompt_is_cached():
    instance = Instance("hybrid")
    for number in (1, 2):
        instance.prefill(request(number, prompt=list(range(16))))
        instance.work()

    assert instance.cached(2) == [12]


def test_running_requests_share_the_blocks_of_a_common_prefix():
    instance = Instance("hybrid", num_blocks=9, budget=64, max_num_seqs=2)
    shared = list(range(24))
    instance.prefill(request(1, prompt=[*shared, 1], max_tokens=8))
    instance.step()
    instance.prefill(request(2, prompt=[*shared, 2], max_tokens=3))
    instance.step()

    assert instance.stats.num_running == 2
    assert instance.stats.num_held_blocks == 9 - instance.stats.num_free_blocks < 2 * 7
    instance.work()
    assert [len(instance.output(number)) for number in (1, 2)] == [8, 3]
    assert instance.is_at_rest()


def test_a_cached_prefix_is_evicted_from_its_end():
    instance = Instance("hybrid", num_blocks=5, budget=64)
    instance.prefill(request(1, prompt=list(range(13)), max_tokens=1))
    instance.work()
    instance.prefill(request(2, 10, max_tokens=1))            # takes the two free blocks and one that is cached
    instance.work()
    instance.prefill(request(3, prompt=list(range(13)), max_tokens=1))
    instance.work()

    assert instance.cached(3) == [8]


def test_a_cached_block_of_a_grant_goes_on_serving_others():
    instance = Instance("prefill", num_blocks=8, budget=64)
    shared = list(range(8))
    for number in (1, 2):
        instance.prefill(request(number, prompt=[*shared, number]))
        instance.work()
    first, second = (prefilled.grant.parts for prefilled in instance.told(m.Prefilled))
    assert first[:2] == second[:2] and first[2] != second[2]

    instance.say(m.Release(1, 1))
    assert instance.stats.num_held_blocks == 3
    instance.say(m.Release(2, 1))
    assert instance.is_at_rest() and instance.stats.num_cached_blocks == 2


def test_tenants_with_different_salts_share_nothing():
    instance = Instance("hybrid")
    for number, salt in ((1, b"a"), (2, b"b")):
        instance.prefill(request(number, prompt=list(range(16)), salt=salt))
        instance.work()

    assert instance.cached(2) == [0]


def test_nothing_is_reused_or_stored_with_prefix_caching_off():
    instance = Instance("hybrid", prefix_caching=False, cache=True)
    for number in (1, 2):
        instance.prefill(request(number, prompt=list(range(16))))
        instance.work()

    assert instance.cached(2) == [0]
    assert instance.stats.num_cached_blocks == 0
    assert not any(isinstance(verb, m.Fetch | m.Store) for verb in instance.done_verbs)


def test_a_request_that_wants_log_probabilities_of_its_prompt_takes_no_cached_prefix():
    instance = Instance("hybrid", budget=64)
    instance.prefill(request(1, prompt=list(range(16))))
    instance.work()
    instance.prefill(request(2, prompt=list(range(16)), num_prompt_logprobs=0))
    instance.work()

    assert instance.cached(2) == [0]
    assert instance.output(2) == whole_output(request(2))


def test_flushing_forgets_what_nobody_uses():
    instance = Instance("hybrid")
    instance.prefill(request(1, prompt=list(range(16))))
    instance.work()
    instance.say(m.Flush())
    instance.prefill(request(2, prompt=list(range(16))))
    instance.work()

    assert instance.cached(2) == [0]


# ---------------------------------------------------------------- the pool


def test_what_one_instance_computed_another_fetches_from_the_pool():
    pool = {}
    first = Instance("prefill", cache=True, pool=pool, budget=64)
    first.prefill(request(1, prompt=list(range(22))))
    first.work()
    second = Instance("prefill", cache=True, pool=pool, budget=64, member="prefill-1")
    second.prefill(request(2, prompt=list(range(22))))
    second.work()

    assert len(pool) == 5
    assert second.cached(2) == [20] and second.stats.pool_hit_tokens == 20
    grants = [instance.told(m.Prefilled)[0].grant for instance in (first, second)]
    assert [part.checksum for part in grants[0].parts] == [part.checksum for part in grants[1].parts]


def test_local_blocks_come_first_and_only_the_following_keys_are_fetched():
    pool = {}
    other = Instance("prefill", cache=True, pool=pool, budget=64)
    other.prefill(request(1, prompt=list(range(30))))
    other.work()
    instance = Instance("hybrid", cache=True, pool=pool, budget=64)
    instance.prefill(request(2, prompt=list(range(10)), max_tokens=1))
    instance.work()
    instance.prefill(request(3, prompt=list(range(30)), max_tokens=1))

    fetch = instance.verb(m.Fetch)
    assert len(fetch.keys) == 5                    # of seven full blocks before the last token, two are here
    instance.work()
    assert instance.cached(3) == [28]


def test_a_fetch_delays_only_its_own_request():
    instance = Instance("prefill", cache=True, budget=64)
    instance.prefill(request(1, 20))
    instance.prefill(request(2, 3))                # has no full block to ask for

    assert instance.has_verb(m.Fetch)
    instance.step()
    assert [prefilled.request_id for prefilled in instance.told(m.Prefilled)] == [2]


def test_a_failed_fetch_is_a_miss():
    instance = Instance("hybrid", cache=True)
    req = request(1, 20)
    instance.prefill(req)
    instance.fail(instance.verb(m.Fetch))
    instance.work()

    assert instance.cached(1) == [0] and instance.output(1) == whole_output(req)
    assert instance.is_at_rest()


def test_only_blocks_that_the_pool_lacks_are_stored():
    instance = Instance("hybrid", cache=True, budget=64, store_generated=False)
    instance.prefill(request(1, prompt=list(range(12)), max_tokens=2))
    instance.work()
    instance.prefill(request(2, prompt=[*range(12), 90, 91, 92, 93, 94], max_tokens=2))
    instance.work()

    stores = [verb for verb in instance.done_verbs if isinstance(verb, m.Store)]
    assert [len(store.keys) for store in stores] == [3, 1]


def test_two_requests_that_computed_the_same_offer_it_once():
    instance = Instance("hybrid", cache=True, budget=64)
    for number in (1, 2):
        instance.prefill(request(number, prompt=list(range(8)), max_tokens=1))
    instance.work()

    assert sum(len(verb.keys) for verb in instance.done_verbs if isinstance(verb, m.Store)) == 2


def test_blocks_written_while_decoding_are_stored_when_asked_for():
    def stored(store_generated):
        instance = Instance("hybrid", cache=True, budget=64, store_generated=store_generated)
        instance.prefill(request(1, 8, max_tokens=10))
        instance.work()
        return len(instance.pool)

    assert (stored(True), stored(False)) == (4, 2)


def test_a_failed_store_is_tried_again_by_the_next_user():
    instance = Instance("hybrid", cache=True, budget=64)
    for number in (1, 2):
        instance.prefill(request(number, prompt=list(range(9)), max_tokens=1))
        while instance.verbs:
            if isinstance(instance.verbs[0], m.Store) and number == 1:
                instance.fail(instance.verbs[0])
            else:
                instance.answer(instance.verbs[0])

    assert len(instance.pool) == 2
    assert instance.is_at_rest()


def test_blocks_that_are_being_stored_are_not_given_out():
    instance = Instance("hybrid", num_blocks=4, cache=True, budget=64)
    instance.prefill(request(1, 12, max_tokens=1))
    instance.answer(instance.verb(m.Fetch))
    instance.step()
    assert instance.stats.num_quarantined_blocks == 1
    instance.prefill(request(2, 14, max_tokens=1))
    assert not instance.has_verb(m.Run) and not instance.has_verb(m.Fetch)

    instance.work()
    assert instance.done(2)


def test_a_slow_pool_keeps_only_a_part_of_the_blocks_from_being_used():
    instance = Instance("hybrid", num_blocks=32, cache=True, budget=64)
    for number in range(1, 8):
        instance.prefill(request(number, 12, max_tokens=1))
        instance.answer(instance.verb(m.Fetch))
        instance.step()

    assert [len(verb.blocks) for verb in instance.verbs if isinstance(verb, m.Store)] == [3, 3, 2]
    assert instance.stats.num_quarantined_blocks == 32 // context.STORE_SHARE
    assert instance.stats.stores_skipped_blocks > 0
    instance.work()
    assert instance.is_at_rest()


def test_after_a_failed_fetch_the_pool_is_left_alone_for_a_while():
    instance = Instance("hybrid", cache=True)
    instance.prefill(request(1, 8))
    instance.fail(instance.verb(m.Fetch))
    instance.prefill(request(2, 8))
    assert not instance.has_verb(m.Fetch)

    instance.say(m.Prefill(request(3, 8), 1), after_s=context.FETCH_PAUSE_S)
    assert instance.has_verb(m.Fetch)


def test_what_was_pulled_is_not_stored_again():
    req = request(1, 8, max_tokens=10)
    instance, grants = decode_with(req, cache=True)
    instance.admit(req, grants[1])
    instance.work()

    assert len(instance.pool) == 2                     # of four full blocks, the prefill instance offered two
